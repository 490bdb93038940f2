"""The account that a server runs as, and the folders that servers keep their data in.

Postgres refuses to run as root. So root starts it in a user namespace, where root has another user id, and binaries and
data stay root's. Where the kernel forbids user namespaces, as in most containers, Postgres runs under a user id that no
account has. A capability lets it pass closed folders, and its binaries are copied to where it may run them.

A lock keeps each folder for one server, until that server is gone. Only folders that clawstream made are ever emptied.
"""

import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from clawstream.errors import PartUnavailable
from clawstream.inference.model_folder import put_whole
from clawstream.locks import locked

SHARED_PROGRAMS = Path("/var/cache/clawstream")
_NOBODY = "nobody"
_OWN_IDS = range(60_706, 61_184)  # user ids from a range that systemd leaves unused
_ASKED_WITHIN_S = 10.0
_LOCK = ".clawstream-lock"
_ADDRESS = "address"
CLAIM_WITHIN_S = 30.0  # a server whose owner was killed needs a moment to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The account of a server: the command prefix that switches to it, and the owner that its files need."""

    prefix: tuple[str, ...] = ()
    owner_id: int | None = None  # None: files keep their owner
    is_root: bool = False  # outside its namespace it is root, so no folder is closed to it

    def give(self, path: Path) -> None:
        """Make this identity the owner of `path` and everything below it."""
        if self.owner_id is None or path.lstat().st_uid == self.owner_id:
            return
        for entry in (*path.rglob("*"), path):  # the folder last, so that an interrupted change is repeated
            os.chown(entry, self.owner_id, _group(self.owner_id), follow_symlinks=False)

    def reachable(self, programs: Path) -> Path:
        """Return a folder where this identity can run the `programs` of a package; they are copied if need be."""
        if self.owner_id is None or self.is_root or not _closed(programs / "bin"):
            return programs
        package = programs.parent
        copy = SHARED_PROGRAMS / f"{programs.name}-{programs.stat().st_mtime_ns}"
        copied = copy / package.name / programs.name
        if not copied.is_dir() or _closed(copied / "bin"):
            draft = copy.with_name(f"{copy.name}.{os.getpid()}")
            for folder in (programs, package.with_name(f"{package.name}.libs")):  # programs find libs relative to them
                shutil.copytree(folder, draft / folder.relative_to(package.parent), symlinks=True)
            for entry in (draft, *draft.rglob("*")):
                _open(entry)
            SHARED_PROGRAMS.chmod(0o755)
            shutil.rmtree(copy, ignore_errors=True)  # nobody uses a copy that its account can't reach
            draft.rename(copy)
        if _closed(copied / "bin"):
            raise PartUnavailable(
                f"Postgres runs as user {self.owner_id} here, and a folder on the way to its programs in {copied} is "
                "closed to other users. Nothing was started. Open that folder to them (chmod o+x), run clawstream as "
                "another user than root, or set CLAWSTREAM_POSTGRES to a database's URL"
            )
        return copied


def identity_for(data: Path) -> Identity:
    """Return the identity that serves `data`: our own, or if we are root, one of another user id.

    Raises PartUnavailable if another user owns `data` and we can't become that user, or a program for that is missing.
    """
    owner_id = data.stat().st_uid if data.exists() else None
    if os.geteuid() != 0:
        if owner_id not in (None, os.geteuid()):
            raise PartUnavailable(
                f"{data} belongs to user {owner_id}, and this is user {os.geteuid()}. Nothing was started. "
                "Run as that user, choose another data folder, or remove this one"
            )
        return Identity()
    setpriv = _program("setpriv")
    if owner_id is not None and owner_id not in (0, _nobody_id()):
        return _as_user(owner_id, data)
    number = _nobody_id()
    namespace = (_program("unshare"), "--user", f"--map-user={number}", f"--map-group={number}")
    if subprocess.run([*namespace, "true"], capture_output=True, timeout=_ASKED_WITHIN_S, check=False).returncode == 0:
        return Identity(prefix=(*namespace, setpriv, "--pdeathsig=INT"), owner_id=0, is_root=True)
    return _as_user(next(number for number in _OWN_IDS if not _has_account(number)), data)


def identity_for_initdb(identity: Identity, data: Path) -> Identity:
    """Return the identity that runs initdb on `data` for `identity`, since initdb needs an account with a name."""
    if identity.owner_id is None or identity.is_root or _has_account(identity.owner_id):
        return identity
    return _as_user(_nobody_id(), data)


def _as_user(user_id: int, data: Path) -> Identity:
    passage = "-all,+dac_override" if _closed(data.parent) else "-all"
    prefix = (
        _program("setpriv"), f"--reuid={user_id}", f"--regid={_group(user_id)}", "--clear-groups",
        f"--inh-caps={passage}", f"--ambient-caps={passage}", "--pdeathsig=INT",
    )  # fmt: skip
    return Identity(prefix=prefix, owner_id=user_id)


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise PartUnavailable(
            f"Postgres refuses to run as root, and `{name}` (of util-linux), by which it runs as somebody else, is not "
            "on PATH. Nothing was started. Run clawstream as another user than root, install util-linux, or set "
            "CLAWSTREAM_POSTGRES to a database's URL"
        )
    return found


def _nobody_id() -> int:
    try:
        return pwd.getpwnam(_NOBODY).pw_uid
    except KeyError as error:
        raise PartUnavailable(
            f"Postgres refuses to run as root, and this system has no user {_NOBODY}. Nothing was started. "
            "Run clawstream as another user than root, or set CLAWSTREAM_POSTGRES to a database's URL"
        ) from error


def _has_account(user_id: int) -> bool:
    return any(account.pw_uid == user_id for account in pwd.getpwall())


def _group(user_id: int) -> int:
    return pwd.getpwuid(user_id).pw_gid if _has_account(user_id) else user_id


def _open(entry: Path) -> None:
    """Let others read and run whatever the owner may, whatever the umask is."""
    if not entry.is_symlink():
        mode = stat.S_IMODE(entry.stat().st_mode)
        entry.chmod(mode | (mode & 0o500) >> 3 | (mode & 0o500) >> 6)


def _closed(folder: Path) -> bool:
    """Whether other users can't enter `folder` or a folder above it."""
    ways = (folder.absolute(), *folder.absolute().parents)
    return any(not way.stat().st_mode & stat.S_IXOTH for way in ways)


def cache_folder() -> Path:
    """The folder for downloads, which can be deleted and fetched again."""
    return Path(platformdirs.user_cache_dir("clawstream"))


def made_once(folder: Path, make: Callable[[Path], None], *, within_s: float) -> Path:
    """Return `folder`, which is whole; where it is missing, `make` fills an empty one that is then renamed to it.

    One process makes it, and the others wait for that one. Where `make` raises, nothing is left of what it made.
    Raises PartUnavailable where another process makes it for more than `within_s`.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.partial")
    with locked(folder.with_name(f"{folder.name}.lock"), within_s=within_s):
        if folder.is_dir():
            return folder
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            make(partial)
            put_whole(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextmanager
def claimed(folder: Path, *, fresh: bool = False, within_s: float = CLAIM_WITHIN_S) -> Iterator[int]:
    """Claim `folder` for one server, and empty it if `fresh`; yield the descriptor of the folder's lock.

    The claim lasts while any process holds that descriptor, so pass it to the server's process within the block.
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
    """Let `address_in` find the server on `folder`; only this user can read the address, which may hold a password."""
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
