"""The files in the data folder by which other commands find a running installation, its parts and its judge.

Each file is replaced as a whole, so a reader never sees half of one. run.json and parts.json are valid only while the
installation holds its lock; a kill releases the lock.

judge.json says early that a judge is away; the log says so only at a vote's deadline. It is written when the judge
begins or stops answering or fails with another error, and otherwise at most once in NOTED_EVERY_MS.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clawstream.local.servers.accounts import in_use, write_private
from clawstream.locks import locked
from clawstream.monitoring.alarm import JudgeReachability, after
from clawstream.stream.stage import now_ms

_LOCK = ".run-lock"
_ADDRESSES = "run.json"
_PARTS = "parts.json"
_LOOKED_AT_S = 1.0  # a process that checks the lock holds it itself for a moment
NOTED_EVERY_MS = 10_000
_JUDGE = "judge.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """The addresses of a running installation's parts."""

    supervisor_pid: int
    kafka: str
    postgres: str
    engines: tuple[str, ...]
    gateway: str
    monitor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """The state of one part."""

    name: str
    pid: int | None  # None: it has no process
    restarts: int
    since_ms: int  # when this state began, since the epoch, UTC
    failure: str | None  # why the supervisor does not restart it; None: it does


def settings_file(data_dir: Path) -> Path:
    """Return the settings file that every part of the installation reads; it stays after the installation stops."""
    return data_dir / "settings.json"


def policy_of(data_dir: Path) -> str | None:
    """Return the id of the policy that last ran on this data folder; None: none did."""
    found = _read(settings_file(data_dir))
    return None if found is None else str(found["policy"]["id"])


@contextmanager
def alone_on(data_dir: Path) -> Iterator[None]:
    """Hold the data folder for one installation; raises PartUnavailable where another runs on it."""
    data_dir.mkdir(parents=True, exist_ok=True)
    with locked(data_dir / _LOCK, within_s=_LOOKED_AT_S):
        (data_dir / _ADDRESSES).unlink(missing_ok=True)
        (data_dir / _PARTS).unlink(missing_ok=True)
        yield


@contextmanager
def announced(data_dir: Path, addresses: Addresses) -> Iterator[None]:
    """Let `addresses_of` find the installation during the block."""
    write_private(data_dir / _ADDRESSES, json.dumps(asdict(addresses), indent=1))
    try:
        yield
    finally:
        (data_dir / _ADDRESSES).unlink(missing_ok=True)


def addresses_of(data_dir: Path) -> Addresses | None:
    """Return the addresses of the installation on this data folder; None: it does not run, or is still starting."""
    found = _read(data_dir / _ADDRESSES) if in_use(data_dir / _LOCK) else None
    return None if found is None else Addresses(**(found | {"engines": tuple(found["engines"])}))


def write_parts(data_dir: Path, parts: Sequence[PartState]) -> None:
    """Let `read_parts` find `parts`."""
    write_private(data_dir / _PARTS, json.dumps([asdict(part) for part in parts], indent=1))


def read_parts(data_dir: Path) -> tuple[PartState, ...]:
    """Return the parts' states as last written; `addresses_of` says whether the installation still runs."""
    return tuple(PartState(**part) for part in _read(data_dir / _PARTS) or ())


def _read(file: Path) -> Any:
    """Return the JSON in the file; None: there is no such file."""
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None


class JudgeNotes:
    """Notes the outcome of each request to a judge."""

    def __init__(self, data_dir: Path, judge: str, *, now_ms: Callable[[], int] = now_ms) -> None:
        self._data_dir = data_dir
        self._judge = judge
        self._now_ms = now_ms
        self._noted = judge_of(data_dir)

    def heard(self, error: str | None) -> None:
        """Note the outcome of a request: an error, or None for a reply. A note that can't be written is skipped."""
        before, now = self._noted, after(self._noted, self._judge, error, self._now_ms())
        if before is not None and now.heard_ms - before.heard_ms < NOTED_EVERY_MS and _alike(before, now):
            return
        self._noted = now
        with suppress(OSError):
            self._data_dir.mkdir(parents=True, exist_ok=True)
            write_private(self._data_dir / _JUDGE, json.dumps(asdict(now), indent=1))


def judge_of(data_dir: Path) -> JudgeReachability | None:
    """Return the last note; None: there is none, or it is unreadable (another version wrote it, power failed)."""
    try:
        return JudgeReachability(**json.loads((data_dir / _JUDGE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _alike(one: JudgeReachability, other: JudgeReachability) -> bool:
    return (one.judge, one.error, one.since_ms) == (other.judge, other.error, other.since_ms)
