"""Child processes: started, heard and ended in one way. None lives longer than this process, however it ends.

Each has a session of its own: a Ctrl-C in the terminal reaches the owner alone, which lets its clients finish first and
ends its children last. A child that may be killed at any time is started by `start_child`. A server that has to stop in
order is a ServerProcess. A small watcher stands between owner and server; it holds one end of a pipe whose other end
closes with the owner, so it notices a SIGKILL of the owner too.

This module also reserves a server's port, and asks whether it answers. A port that was only looked up could be taken
by another process before the server binds it.
"""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from clawstream.errors import PartUnavailable
from clawstream.local.servers import watcher

_BEYOND_GRACE_S = 5.0
_LOOK_EVERY_S = 0.02
HOST = "127.0.0.1"
_LINUX = sys.platform == "linux"
_LINE_BYTES = 2**22  # the longest line of a child's output that is read

die_with_parent = watcher.signal_at_parents_death(signal.SIGKILL)
"""A `preexec_fn` for a child that may be killed at any time: it ends with the thread that started it (Linux only)."""


async def start_child(
    command: Sequence[str], *, log: Path, piped: bool = False, environment: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Start a child that writes to `log`. If `piped`, the caller writes to its stdin and reads its stdout instead.

    It has a session of its own: a Ctrl-C at the terminal reaches its starter alone, which ends it by `end_child`.
    """
    with log.open("ab") as words:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE if piped else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if piped else words,
            stderr=words,
            limit=_LINE_BYTES,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


async def end_child(process: asyncio.subprocess.Process, within_s: float) -> bool:
    """End the child and what it left behind, by force after `within_s`; return whether it ended without force.

    A child that has ended by itself is left alone: its id may be another process' by now.
    """
    if process.returncode is not None:
        return True
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), within_s)
    except TimeoutError:
        return False
    else:
        return True
    finally:
        kill_group(process.pid)
        await process.wait()


def kill_group(pid: int) -> None:
    """End the processes left behind in the process's own group, if any."""
    with suppress(ProcessLookupError, PermissionError):  # macOS raises the second for a group of zombies
        os.killpg(pid, signal.SIGKILL)


def run_tool(command: Sequence[str], folder: Path, within_s: float) -> tuple[int, str]:
    """Run a program to its end; return its exit status and its last words."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=within_s, check=False)
    return done.returncode, last_lines(done.stdout + done.stderr)


def last_lines(text: str, num_lines: int = 15) -> str:
    """Return the end of what a process said."""
    return "\n".join(text.splitlines()[-num_lines:])


class ServerProcess:
    """A running server that ends with this process. It writes a new log; the one before it is kept as .log.1.

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
        if log.exists():
            log.replace(log.with_name(f"{log.name}.1"))
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

    @contextmanager
    def once_ready(self, is_ready: Callable[[], bool], within_s: float, *, name: str, instead: str) -> Iterator[None]:
        """Run the block once the server is ready. The server is stopped if it does not get ready or the block fails.

        `instead` tells a person what else to do.
        """
        ended_at_s = time.monotonic() + within_s
        try:
            while (status := self.exit_status()) is not None or not is_ready():
                if status is not None or time.monotonic() > ended_at_s:
                    late = f"was not ready within {within_s:g} s"
                    what = late if status is None else f"ended with exit status {status}"
                    raise PartUnavailable(  # noqa: TRY301
                        f"{name} {what}. It was stopped; its data is as it was. {instead}. "
                        f"The end of its log, {self.log}:\n{self.log_tail()}"
                    )
                time.sleep(_LOOK_EVERY_S)
            yield
        except BaseException:
            self.stop()
            raise

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
        return last_lines(self.log.read_text(errors="replace"), num_lines)


class EmbeddedServer(ABC):
    """A server on `data_dir`, from `__enter__` to `__exit__` and never longer than this process.

    Its data is kept between runs; `fresh` empties it first.
    """

    def __init__(self, data_dir: Path, log_name: str, *, fresh: bool, port: int | None) -> None:
        self.data_dir = data_dir.absolute()
        self.log = self.data_dir / log_name
        self._fresh = fresh
        self._port = port
        self._server_process: ServerProcess | None = None

    @abstractmethod
    def __enter__(self) -> Self: ...

    def restart(self) -> None:
        """Start an ended server again, on the same data and port; raises PartUnavailable as the first start does."""
        self.__exit__(None, None, None)  # lets go of what is left of it
        self.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._server_process is not None:
            self._server_process.stop()

    def exit_status(self) -> int | None:
        """None while the server runs; else its exit status."""
        assert self._server_process is not None, "asked before __enter__"
        return self._server_process.exit_status()


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


@contextmanager
def reserved(port: int | None = None, *, setting: str | None = None) -> Iterator[int]:
    """Keep a free port, or `port`, for a server that binds with SO_REUSEADDR, as nearly all do; nobody else gets it.

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
                kept.enter_context(_shown_to_reservations(found))
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

    It is first bound without SO_REUSEADDR, so that it gets no port that another process has bound. If that fails, it is
    bound with SO_REUSEADDR: then only a process that listens on the port keeps it out.
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


def _shown_to_reservations(port: int) -> socket.socket:
    """Return a socket by which other reservations see that this port is kept; a sharing socket does not show that."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0clawstream-port-{port}")
    except OSError:
        name.close()
        raise
    return name
