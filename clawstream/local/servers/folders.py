"""The folders that servers keep their data in, and who may use them.

One server at a time: a folder is claimed by a lock that lasts until the server is gone, and only a folder that
clawstream made is ever emptied.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from clawstream.errors import PartUnavailable
from clawstream.locks import locked

_LOCK = ".clawstream-lock"
_ADDRESS = "address"
CLAIM_WITHIN_S = 30.0  # a server whose owner was killed needs a moment to end


def data_folder(name: str) -> Path:
    """The folder in which `name` is kept between runs."""
    return Path(platformdirs.user_data_dir("clawstream")) / name


def cache_folder() -> Path:
    """The folder for downloads; deleting it loses nothing."""
    return Path(platformdirs.user_cache_dir("clawstream"))


@contextmanager
def claimed(folder: Path, *, fresh: bool = False, within_s: float = CLAIM_WITHIN_S) -> Iterator[int]:
    """Claim `folder` for one server, emptied if `fresh`; yield the descriptor of its lock.

    The claim lasts while any process holds that descriptor: hand it to the server's process before the block ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    foreign = next((entry.name for entry in folder.iterdir()), None)
    if foreign is not None and not (folder / _LOCK).exists():
        raise PartUnavailable(
            f"{folder} holds {foreign}, which clawstream did not write. It was left as it is and nothing was started. "
            "Choose an empty folder"
        )
    with locked(folder / _LOCK, within_s=within_s) as lock_fd:
        (folder / _ADDRESS).unlink(missing_ok=True)
        if fresh:
            _empty(folder)
        yield lock_fd


def publish(folder: Path, address: str) -> None:
    """Let `address_in` find the server that claimed `folder`; only this user can read it, as it may hold a password."""
    write_private(folder / _ADDRESS, address)


def write_private(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, readable by this user only."""
    written = path.with_name(f"{path.name}.new")
    written.unlink(missing_ok=True)
    written.touch(mode=0o600)
    written.write_text(text)
    written.replace(path)


def address_in(folder: Path) -> str | None:
    """The address of the server that runs on `folder`; None if none runs there."""
    if not in_use(folder / _LOCK):
        return None
    try:
        return (folder / _ADDRESS).read_text()
    except FileNotFoundError:
        return None


def in_use(lock: Path) -> bool:
    """Whether a process holds the lock file `lock`."""
    try:
        with locked(lock, within_s=0, shared=True, create=False):
            return False
    except FileNotFoundError:
        return False
    except PartUnavailable:
        return True


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name == _LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
