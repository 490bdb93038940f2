"""The file of keys: written whole or not at all, and read again by a running gateway when it changes."""

import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from clawstream.errors import ConfigError
from clawstream.gateway.access.keys import PREFIX, Allowance, Key, KeyRing, mend, read_ring, sha256, write_ring

LOG = logging.getLogger(__name__)
LOOK_EVERY_S = 2.0
_KEY_BYTES = 32


def add_key(path: Path, name: str, allowance: Allowance) -> str:
    """Add a key `name` and return it; the file keeps only its hash. Raises ConfigError."""
    shown = PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    key = Key(name=name, sha256=sha256(shown), created_at=_now(), **asdict(allowance))
    with _changing(path):
        _write(path, read_keys(path).with_key(key))
    return shown


def revoke_key(path: Path, name: str) -> None:
    """Revoke the key `name`. Raises ConfigError."""
    with _changing(path):
        _write(path, read_keys(path).without(name, revoked_at=_now()))


def open_door(path: Path) -> None:
    """Let this machine's programs in without a key until one is added. Raises ConfigError while one is in force."""
    with _changing(path):
        _write(path, read_keys(path).opened())


def read_keys(path: Path) -> KeyRing:
    """Return the keys in the file; a missing file has none. Raises ConfigError."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return KeyRing(())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text ({error}). {mend(str(path))}") from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error}). Mend it, or set gateway.keys_file") from error
    return read_ring(text, str(path))


class WatchedKeys:
    """The keys in force; the file is looked at again every 2 s at most.

    If the file can't be read, a warning is logged and the last keys stay in force. If it is gone, no key is in force.
    """

    def __init__(self, path: Path, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._now_s = now_s
        self._looked_at_s = now_s()
        self._stamp = self._look()
        self._ring = read_keys(path)
        self._in_use = bool(self._ring.keys) and not self._ring.open
        if self._stamp is not None and stat.S_IMODE(path.stat().st_mode) & 0o077:
            LOG.warning("keys=%s state=readable_by_others do=chmod 600", path)

    @property
    def in_use(self) -> bool:
        """Whether the file has had keys since the start: then everybody needs a key, even if all are gone.

        Only a person's `open_door` changes that.
        """
        self.ring()
        return self._in_use

    def ring(self) -> KeyRing:
        """Return the keys as they were at most 2 s ago."""
        now_s = self._now_s()
        if now_s - self._looked_at_s >= LOOK_EVERY_S:
            self._looked_at_s = now_s
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                self._read()
        return self._ring

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> None:
        try:
            self._ring = read_keys(self._path)
        except ConfigError as error:
            LOG.warning("keys=unchanged reason=%s", error)
            return
        self._in_use = (self._in_use or bool(self._ring.keys)) and not self._ring.open
        LOG.info(
            "keys=read in_force=%d revoked=%d",
            len(self._ring.in_force),
            len(self._ring.keys) - len(self._ring.in_force),
        )


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Keep others from changing the file during the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, ring: KeyRing) -> None:
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(write_ring(ring))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
