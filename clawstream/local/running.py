"""What a running installation tells other commands, in its data folder: its addresses and how its parts fare.

run.json and parts.json are replaced as a whole, so a reader never sees half of one. They count only while the
installation holds its lock, however it ended.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from clawstream.local.servers.folders import in_use, write_private
from clawstream.locks import locked

_LOCK = ".run-lock"
_ADDRESSES = "run.json"
_PARTS = "parts.json"
_LOOKED_AT_S = 1.0  # a process that asks whether the lock is held has it for a moment


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
    """One part at one moment."""

    name: str
    pid: int | None  # None: it has no process
    restarts: int
    since_ms: int  # when this state began, since the epoch, UTC
    failure: str | None  # why it is not started again; None: it is started again


def settings_file(data_dir: Path) -> Path:
    """Return the settings file that every part of the installation reads; it stays after the installation stops."""
    return data_dir / "settings.json"


def policy_of(data_dir: Path) -> str | None:
    """Return the id of the policy that was last up on this data folder; None: none was."""
    try:
        found: str = json.loads(settings_file(data_dir).read_text())["policy"]["id"]
    except FileNotFoundError:
        return None
    return found


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
    """Let `addresses_of` find the installation for the length of the block."""
    write_private(data_dir / _ADDRESSES, json.dumps(asdict(addresses), indent=1))
    try:
        yield
    finally:
        (data_dir / _ADDRESSES).unlink(missing_ok=True)


def addresses_of(data_dir: Path) -> Addresses | None:
    """Return this data folder's running installation's addresses; None: none runs, or its servers are starting."""
    if not in_use(data_dir / _LOCK):
        return None
    try:
        found = json.loads((data_dir / _ADDRESSES).read_text())
    except FileNotFoundError:
        return None
    return Addresses(**(found | {"engines": tuple(found["engines"])}))


def write_parts(data_dir: Path, parts: Sequence[PartState]) -> None:
    """Let `read_parts` find `parts`."""
    write_private(data_dir / _PARTS, json.dumps([asdict(part) for part in parts], indent=1))


def read_parts(data_dir: Path) -> tuple[PartState, ...]:
    """Return how the parts fared when the supervisor last wrote; `addresses_of` says whether it still runs."""
    try:
        found = json.loads((data_dir / _PARTS).read_text())
    except FileNotFoundError:
        return ()
    return tuple(PartState(**part) for part in found)
