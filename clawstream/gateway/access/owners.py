"""Which key owns a session: the first one that was answered in it, for ever.

The log has every answer and its key. A file beside the spool has each session's owner (16 bytes of a hash, a number
for the key), so that a look-up takes microseconds and no memory, however many sessions there were. A lost or damaged
file is rebuilt from the log. Until that is done (`whole`), a session that is not in the file may have an owner, so
nobody with a key can go on with it.

A refused request owns nothing. A request under way keeps other keys out of its session until it is over. Its key owns
the session once a token of its answer is on the log.
"""

import asyncio
import hashlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from clawstream.errors import PartUnavailable, TryLater
from clawstream.events import Event, ExchangeCompleted, ExchangeFailed

LOG = logging.getLogger(__name__)
FOLDER = "owners"
KEEP_EVERY_S = 1.0
_NOTE_EVERY_MS = 60_000  # how often the file notes how far the log was read, if there is no new owner
_CLOCKS_DIFFER_MS = 3_600_000  # the most by which the broker's clock may differ from ours
_HASH_BYTES = 16
_KEPT = 10_000  # newest sessions that are remembered: their further answers need no write
_AS_BYTES = ("utf-8", "surrogatepass")  # so that any name in a record can be kept
_VERSION = 1
_SCHEMA = (
    "CREATE TABLE keys (id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE)",
    "CREATE TABLE owners (session BLOB PRIMARY KEY, key_id INTEGER NOT NULL, at_ms INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE log (read_to_ms INTEGER NOT NULL)",
    f"PRAGMA user_version = {_VERSION}",
)
_CLAIM = """
    INSERT INTO owners SELECT ?, id, ? FROM keys WHERE name = ?
    ON CONFLICT DO UPDATE SET key_id = excluded.key_id, at_ms = excluded.at_ms WHERE excluded.at_ms < at_ms
"""
_OWNER = "SELECT name FROM owners JOIN keys ON id = key_id WHERE session = ?"


class SessionClaim(NamedTuple):
    """The fact that a key was answered in a session."""

    session: bytes  # hashed
    key_name: str
    at_ms: int


def claim_of(event: Event) -> SessionClaim | None:
    """Return the event's claim to its session; None: it has no answer, or no key."""
    if not isinstance(event, ExchangeCompleted | ExchangeFailed) or event.key_name is None:
        return None
    if isinstance(event, ExchangeFailed) and not event.output_ids:
        return None
    return SessionClaim(hashed(event.session_id), event.key_name, event.finished_at_ms)


class Owners:
    """The owners of one log's sessions, in a file that `run` and `close` write. Raises PartUnavailable."""

    def __init__(self, path: Path, now_ms: Callable[[], int]) -> None:
        self._path = path
        self._now_ms = now_ms
        self._reading, self._writing = _opened(path), _opened(path)  # the second for the writer's thread
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="owners")
        self._fresh: dict[bytes, SessionClaim] = {}  # not in the file yet, the earliest of each session
        self._keeping: Mapping[bytes, SessionClaim] = {}  # on their way into it
        self._kept: dict[bytes, int] = {}  # of the newest sessions in the file: when the owner's first answer ended
        self._under_way: dict[str, dict[str | None, int]] = {}
        self._failing = False
        self._noted_at_ms = 0
        self.read_to_ms: int | None = self._read_to_ms()  # None: nothing of the log is in the file
        self.whole = False  # whether all owners that the log names are known here

    def owner_of(self, session_id: str) -> str | None:
        """Return the name of the session's key; None: it has none.

        Raises TryLater where that is not known: the log is still being read, or the file can't be.
        """
        session = hashed(session_id)
        known = self._fresh.get(session) or self._keeping.get(session)
        if known is not None:
            return known.key_name
        try:
            found = self._reading.execute(_OWNER, (session,)).fetchone()
        except sqlite3.Error as error:
            raise TryLater(
                f"the owner of session {session_id} can't be read from {self._path} ({error}); if the file is removed, "
                "the gateway makes it again from the log when it is started"
            ) from error
        if found is None and not self.whole:
            raise TryLater(f"the owner of session {session_id} is not known yet: the log is still being read")
        return None if found is None else bytes(found[0]).decode(*_AS_BYTES)

    def is_open_to(self, session_id: str, key_name: str | None) -> bool:
        """Return whether the session is the key's or nobody's, and no other key is being answered in it.

        Raises TryLater where a key asks and the owner is not known.
        """
        if any(holder not in (None, key_name) for holder in self._under_way.get(session_id, ())):
            return False
        try:
            return self.owner_of(session_id) in (None, key_name)
        except TryLater:
            if key_name is None:  # without keys nobody can be told apart
                return True
            raise

    @contextmanager
    def holding(self, session_id: str, key_name: str | None) -> Iterator[None]:
        """Keep other keys out of the session during the block."""
        holders = self._under_way.setdefault(session_id, {})
        holders[key_name] = holders.get(key_name, 0) + 1
        try:
            yield
        finally:
            holders[key_name] -= 1
            if not holders[key_name]:
                del holders[key_name]
            if not holders:
                self._under_way.pop(session_id, None)

    def learn(self, events: Iterable[Event]) -> None:
        """Learn the owners from events on the log, in any order: the key that was answered first is the owner."""
        for claim in map(claim_of, events):
            if claim is not None and not self._is_known(claim):
                self._fresh[claim.session] = claim

    async def take(self, claims: Iterable[SessionClaim]) -> None:
        """Return once the claims, in any order, are in the file. Raises TryLater where it can't be written."""
        await asyncio.wrap_future(self._writer.submit(self._write, list(claims), None))

    async def run(self) -> None:
        """Write new claims to the file, until cancelled. A write that fails is logged once and tried again."""
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            if self._fresh or self._now_ms() - self._noted_at_ms >= _NOTE_EVERY_MS:
                await self._keep()

    def close(self) -> None:
        """Write all claims to the file; if the disk fails, they are only on the log."""
        try:
            self._writer.submit(self._write, self._gathered(), self._whole_to_ms()).result()
        except TryLater as error:
            LOG.warning("owners=not_kept reason=%s; they are read from the log at the next start", error)
        self._writer.shutdown()
        self._writing.close()
        self._reading.close()

    def _is_known(self, claim: SessionClaim) -> bool:
        known = self._fresh.get(claim.session) or self._keeping.get(claim.session)
        since_ms = self._kept.get(claim.session) if known is None else known.at_ms
        return since_ms is not None and since_ms <= claim.at_ms

    async def _keep(self) -> None:
        gathered, to_ms = self._gathered(), self._whole_to_ms()
        try:
            await asyncio.wrap_future(self._writer.submit(self._write, gathered, to_ms))
        except TryLater as error:
            if not self._failing:
                LOG.error("owners=not_kept reason=%s; they stay in memory, and are on the log", error)
            self._failing = True
            return
        self._kept |= {claim.session: claim.at_ms for claim in gathered}
        for session in list(islice(self._kept, max(0, len(self._kept) - _KEPT))):
            del self._kept[session]
        self._keeping, self._failing, self._noted_at_ms = {}, False, self._now_ms()

    def _gathered(self) -> list[SessionClaim]:
        self._keeping = {**self._keeping, **self._fresh}
        self._fresh = {}
        return list(self._keeping.values())

    def _whole_to_ms(self) -> int | None:
        """Return up to when the log has no owner that is unknown here; None: it may have older ones."""
        return self._now_ms() - _CLOCKS_DIFFER_MS if self.whole else None

    def _write(self, claims: list[SessionClaim], read_to_ms: int | None) -> None:
        """Write the claims, and until when the log was read. Runs in the writer's thread; raises TryLater."""
        try:
            with self._writing as file:
                names = {(claim.key_name.encode(*_AS_BYTES),) for claim in claims}
                file.executemany("INSERT OR IGNORE INTO keys (name) VALUES (?)", names)
                file.executemany(_CLAIM, ((c.session, c.at_ms, c.key_name.encode(*_AS_BYTES)) for c in claims))
                if read_to_ms is not None:
                    file.execute("DELETE FROM log")
                    file.execute("INSERT INTO log VALUES (?)", (read_to_ms,))
        except sqlite3.Error as error:
            raise TryLater(f"{self._path} can't be written to ({error})") from error

    def _read_to_ms(self) -> int | None:
        found = self._reading.execute("SELECT read_to_ms FROM log").fetchone()
        return None if found is None else int(found[0])


def hashed(session_id: str) -> bytes:
    """Return the hash that stands for the session in the file."""
    return hashlib.blake2b(session_id.encode(*_AS_BYTES), digest_size=_HASH_BYTES).digest()


def _opened(path: Path) -> sqlite3.Connection:
    """Return a connection to the file; replace a file that is not an owners' file. Raises PartUnavailable."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            return _connected(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            LOG.warning("owners=damaged path=%s reason=%s; they are read from the log again", path, error)
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            return _connected(path)
    except (OSError, sqlite3.Error) as error:
        raise PartUnavailable(
            f"{path}, which has the owner of each session, can't be opened ({error}); nothing is served. Let this "
            "account write there, or set data_dir"
        ) from error


def _connected(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    file = sqlite3.connect(path, check_same_thread=False)
    try:
        file.execute("PRAGMA journal_mode = WAL")
        # A power failure loses only the newest commits, claims and `read_to_ms` alike; the log is then read again.
        file.execute("PRAGMA synchronous = NORMAL")
        (found,) = file.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        (version,) = file.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"it is of version {version}, expected {_VERSION}")
        if version == 0:
            with file:
                file.execute("BEGIN IMMEDIATE")
                for statement in _SCHEMA:
                    file.execute(statement)
    except sqlite3.Error:
        file.close()
        raise
    return file
