"""Keeps a server running for as long as this process lives; its port, and whether it is ready to work.

A small watcher stands between the two. It holds one end of a pipe whose other end dies with us, so it notices a SIGKILL
of the owner too. Watcher and server have sessions of their own: a Ctrl-C in the terminal reaches the owner alone, which
lets its clients finish first and stops the server last.

A port that was only looked up could be taken by any process before the server gets there.
"""

import errno
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import aiohttp

from clawstream.errors import PartUnavailable
from clawstream.local.servers import watcher

_BEYOND_GRACE_S = 5.0

die_with_parent = watcher.signal_at_parents_death(signal.SIGKILL)
"""A `preexec_fn` for a child that may be killed at any time: it ends with the thread that started it (Linux only)."""


class ServerProcess:
    """A running server that ends with this process.

    `keep_fd` is held open until the server is gone; a lock on it says that the server's folder is in use.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        log: Path,
        grace_s: float,
        stop_signal: signal.Signals = signal.SIGTERM,
        keep_fd: int | None = None,
    ) -> None:
        self.name = Path(command[0]).name
        self.log = log
        self._grace_s = grace_s
        with log.open("ab") as output:
            self._watcher = subprocess.Popen(
                [sys.executable, "-I", "-S", watcher.__file__, str(int(stop_signal)), str(grace_s), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=folder,
                start_new_session=True,
                pass_fds=() if keep_fd is None else (keep_fd,),
            )

    @property
    def watcher_pid(self) -> int:
        """The process whose only child is the server."""
        return self._watcher.pid

    def exit_status(self) -> int | None:
        """None while the server runs; else its exit status, 128 + n for signal n."""
        return self._watcher.poll()

    def stop(self) -> None:
        """End the server; return when it is gone. A second call does nothing."""
        assert self._watcher.stdin is not None
        # Both, because a forked child of ours may hold a copy of the pipe.
        self._watcher.stdin.close()
        with suppress(ProcessLookupError):
            self._watcher.terminate()
        try:
            self._watcher.wait(self._grace_s + _BEYOND_GRACE_S)
        except subprocess.TimeoutExpired as error:
            raise PartUnavailable(
                f"{self.name} is still there {self._grace_s + _BEYOND_GRACE_S:g} s after it was told to stop, "
                f"below process {self._watcher.pid}. Kill that one and its child. Log: {self.log}"
            ) from error

    def log_tail(self, num_lines: int = 15) -> str:
        """The end of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


def answers(http: aiohttp.ClientSession, url: str) -> Callable[[], Awaitable[str | None]]:
    """Return a function that asks `url` and returns why it did not answer 200 (the page's words, if any), or None."""

    async def missing() -> str | None:
        try:
            async with http.get(url, allow_redirects=False) as response:
                if response.status == 200:
                    return None
                return _problems(await response.text()) or f"{url} answers HTTP {response.status}"
        except (aiohttp.ClientError, TimeoutError):
            return f"{url} does not answer"

    return missing


def _problems(page: str) -> str:
    """The problems on the gateway's /readyz; empty on a page of another kind."""
    try:
        return "; ".join(str(part["problem"]) for part in json.loads(page)["missing"])
    except (ValueError, KeyError, TypeError):
        return ""


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
