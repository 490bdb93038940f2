"""Free ports of 127.0.0.1, each kept for its server until that server listens.

A port that was only looked up could be taken by any process before the server gets there.
"""

import errno
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from clawstream.errors import PartUnavailable

HOST = "127.0.0.1"
_LINUX = sys.platform == "linux"


@contextmanager
def reserved(port: int | None = None, *, setting: str | None = None) -> Iterator[int]:
    """Keep a free port, or `port`, for a server that binds with SO_REUSEADDR, as nearly all do, and from all others.

    Connections in TIME_WAIT of a server that has just ended do not matter. Raises PartUnavailable where the port can't
    be had, naming the `setting` that asks for it.

    Start the server within the block, and leave it once the server listens. Only Linux can share a port in that way;
    elsewhere the port is let go before the block runs.
    """
    with ExitStack() as kept:
        try:
            keeper = kept.enter_context(_bound(port or 0))
            found: int = keeper.getsockname()[1]
            if _LINUX:
                kept.enter_context(_said(found))
        except OSError as error:
            named = "" if setting is None else f" ({setting})"
            raise PartUnavailable(
                f"port {port} of {HOST}{named} can't be had: {error.strerror}. Nothing was started. "
                "Stop what listens there, or choose another port"
            ) from error
        if not _LINUX:
            kept.close()
        yield found


@contextmanager
def reserved_again(folder: Path, port: int | None = None) -> Iterator[int]:
    """Keep `port`, or the last port of `folder`'s server, so that its address stays; else any free port."""
    known = folder / "port"
    with ExitStack() as kept:
        try:
            found = kept.enter_context(reserved(int(known.read_text()) if port is None else port))
        except (OSError, ValueError, PartUnavailable):
            if port is not None:
                raise
            found = kept.enter_context(reserved())
        known.write_text(f"{found}\n")
        yield found


def _bound(port: int) -> socket.socket:
    """Return a socket on the port that a server can share.

    It is first bound without sharing, so that it gets no port that another process has bound. Only where that fails for
    a port asked for by number, it is bound so that only a listener keeps it out.
    """
    for sharing in (False, True):
        keeper = socket.socket()
        try:
            if sharing or not _LINUX:
                keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            keeper.bind((HOST, port))
        except OSError as error:
            keeper.close()
            if sharing or error.errno != errno.EADDRINUSE:
                raise
            continue
        if _LINUX:
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return keeper
    raise AssertionError("the second try returns or raises")


def _said(port: int) -> socket.socket:
    """Return a socket by which other reservations see that this port is kept; a sharing socket does not show that."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0clawstream-port-{port}")
    except OSError:
        name.close()
        raise
    return name
