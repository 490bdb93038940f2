"""Whom a server runs as, where it refuses to run as root.

The account that owns the data, else `nobody`. No folder's permissions are changed for it: where one on the way is
closed to other users, the server alone may pass.
"""

import os
import pwd
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from clawstream.errors import PartUnavailable

_FALLBACK = "nobody"


def account_for(data: Path) -> pwd.struct_passwd | None:
    """The account to run as; None: as we are.

    Raises PartUnavailable if `data` is somebody else's and we can't become them.
    """
    owner_uid = data.stat().st_uid if data.exists() else None
    if os.geteuid() != 0:
        if owner_uid not in (None, os.geteuid()):
            raise PartUnavailable(
                f"{data} belongs to user {owner_uid}, and this is user {os.geteuid()}. Nothing was started. "
                "Run as that user, choose another data folder, or remove this one"
            )
        return None
    try:
        return pwd.getpwnam(_FALLBACK) if owner_uid in (None, 0) else pwd.getpwuid(owner_uid)
    except KeyError as error:
        who = _FALLBACK if owner_uid in (None, 0) else f"{owner_uid}, which owns {data}"
        raise PartUnavailable(
            f"Postgres refuses to run as root, and this system has no user {who}. Nothing was started. "
            "Run clawstream as another user than root, or set CLAWSTREAM_POSTGRES to a database's URL"
        ) from error


def command_as(account: pwd.struct_passwd | None, command: Sequence[str], *, touches: Sequence[Path]) -> list[str]:
    """`command`, to be run as `account`, able to reach the folders that it touches."""
    if account is None:
        return list(command)
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise PartUnavailable(
            "Postgres refuses to run as root, and `setpriv` (of util-linux), which starts it as another user, is not "
            "on PATH. Nothing was started. Run clawstream as another user than root, install util-linux, or set "
            "CLAWSTREAM_POSTGRES to a database's URL"
        )
    passage = "-all,+dac_override" if any(map(_closed, touches)) else "-all"
    return [
        setpriv, f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups",
        f"--inh-caps={passage}", f"--ambient-caps={passage}", "--pdeathsig=INT", *command,
    ]  # fmt: skip


def _closed(folder: Path) -> bool:
    """Whether other users can't get to `folder`; its own mode does not count, only the way to it."""
    return any(not parent.stat().st_mode & stat.S_IXOTH for parent in folder.absolute().parents)
