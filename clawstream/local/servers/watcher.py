"""Run one server and end it when its owner is gone; a script of its own, started by server_process.py.

The owner holds the other end of stdin. On end of file there, on SIGTERM, or when it has another parent, the script
sends the stop signal, waits for the grace time, and kills the server's process group. It imports little, and only from
the standard library, so that it starts in milliseconds.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

LOOK_AT_PARENT_EVERY_S = 1.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def signal_at_parents_death(number: int) -> Callable[[], None]:
    """Return a `preexec_fn` by which Linux sends `number` when the forking thread ends; elsewhere it does nothing."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def before_exec() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)

    return before_exec


def watch(command: list[str], *, stop_signal: int, grace_s: float) -> int:
    """Run `command` to its end, or to ours; return its exit status as a shell would."""
    owner = os.getppid()
    woken = _wake_on_signals()
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=signal_at_parents_death(stop_signal),  # noqa: PLW1509  # there is one thread
    )
    while server.poll() is None and os.getppid() == owner:
        ready, _, _ = select.select([0, woken], [], [], LOOK_AT_PARENT_EVERY_S)
        if 0 in ready and not os.read(0, 1024):
            break
        if woken in ready and any(number in _STOP_SIGNALS for number in os.read(woken, 1024)):
            break
    _end(server, stop_signal, grace_s)
    for number in _STOP_SIGNALS:  # the interpreter's end makes a handler the default, and a late signal would kill us
        signal.signal(number, signal.SIG_IGN)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def _wake_on_signals() -> int:
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (*_STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return woken


def _end(server: "subprocess.Popen[bytes]", stop_signal: int, grace_s: float) -> None:
    if server.poll() is None:
        server.send_signal(stop_signal)
    try:
        server.wait(grace_s)
    except subprocess.TimeoutExpired:
        print(f"watcher: no end within {grace_s:g} s of signal {stop_signal}; killing {server.pid}", file=sys.stderr)
    with suppress(ProcessLookupError, PermissionError):  # macOS raises the second for a group of zombies
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


if __name__ == "__main__":
    sys.exit(watch(sys.argv[3:], stop_signal=int(sys.argv[1]), grace_s=float(sys.argv[2])))
