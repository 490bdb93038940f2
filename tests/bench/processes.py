"""Processes under measurement: where they run, what they have used, and that they are gone afterwards."""

import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from clawstream.local.servers.server_process import die_with_parent

READY_WITHIN_S = 300.0
SUBJECT_CORE, LOAD_CORE = 0, 1


class Usage(NamedTuple):
    """What a process and all its descendants have used so far, and hold now."""

    cpu_s: float
    rss_bytes: int
    waited_s: float = 0.0  # ready to run while others had the core


def usage(pid: int) -> Usage:
    """Return the usage of the tree below `pid`; the kernel counts CPU in steps of 10 ms."""
    cpu_s, rss_bytes, waited_s = 0.0, 0, 0.0
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            cpu_s += times.user + times.system
            rss_bytes += process.memory_info().rss
            waited_s += _waited_s(process.pid)
    return Usage(cpu_s, rss_bytes, waited_s)


def _waited_s(pid: int) -> float:
    """Return how long the threads of a process have waited for a core; the second number of their schedstat, in ns."""
    waited_ns = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            waited_ns += int(thread.read_text().split()[1])
    return waited_ns / 1e9


def pin_load() -> None:
    """Keep this process, and all that it starts without `started(core=...)`, on the load's core."""
    os.sched_setaffinity(0, {LOAD_CORE})


@contextlib.contextmanager
def started(
    command: Sequence[str],
    *,
    log: Path,
    ready: Callable[[], bool],
    core: int = SUBJECT_CORE,
    environment: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """Yield the pid of `command` on one core once `ready`; it has ended afterwards."""
    with log.open("wb") as words:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdout=words, stderr=words, env={**os.environ, **(environment or {})},
            preexec_fn=die_with_parent,  # there is one thread
        )  # fmt: skip
    try:
        deadline = time.monotonic() + READY_WITHIN_S
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                raise RuntimeError(f"{' '.join(command)[:200]}: not ready, exit status {process.poll()}:\n{end}")
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def fetched(url: str, *, body: bytes | None = None) -> bytes | None:
    """Return what a GET, or a POST of `body`, is answered with; None where it is not answered with 200."""
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: bytes = answer.read()
            return found
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None
