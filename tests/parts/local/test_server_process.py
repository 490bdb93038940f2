"""A server ends with its owner, however the owner ends, and not before."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from clawstream.errors import PartUnavailable
from clawstream.local.servers import accounts, watcher
from clawstream.local.servers.server_process import ServerProcess, end_child, start_child

WITHIN_S = 10.0
SERVES = "import signal; print('serving', flush=True); signal.pause()"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SERVES}"
LAST_WORDS = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('goodbye', flush=True), sys.exit(0)));"
    + SERVES
)
OWNER = """
import os, sys, time
from pathlib import Path
from clawstream.local.servers.server_process import ServerProcess
command = [sys.executable, "-c", sys.argv[2]]
leash = ServerProcess(command, folder=Path(sys.argv[1]), log=Path(sys.argv[1], "log"), grace_s=1)
forked = 1
exec(sys.argv[3])
if forked:
    print(leash.watcher_pid, flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", leash.exit_status(), flush=True)
    leash.stop()
    print("stopped", leash.exit_status(), flush=True)
"""


def wait_until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def start(folder: Path, code: str, *, grace_s: float = 1.0) -> tuple[ServerProcess, psutil.Process]:
    server_process = ServerProcess([sys.executable, "-c", code], folder=folder, log=folder / "log", grace_s=grace_s)
    assert wait_until(lambda: "serving" in server_process.log_tail())
    return server_process, psutil.Process(server_process.watcher_pid).children()[0]


def started_by_another(
    folder: Path, code: str, *, before_waiting: str = ""
) -> tuple["subprocess.Popen[str]", psutil.Process, psutil.Process]:
    command = [sys.executable, "-c", OWNER, str(folder), code, before_waiting]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert owner.stdout is not None
    server_process = psutil.Process(int(owner.stdout.readline()))
    assert wait_until(lambda: "serving" in (folder / "log").read_text())
    return owner, server_process, server_process.children()[0]


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it went between the two questions
        return True


def end(owner: "subprocess.Popen[str]") -> None:
    owner.kill()
    owner.communicate(timeout=WITHIN_S)


@pytest.mark.parametrize("code", [SERVES, STUBBORN], ids=["obedient", "stubborn"])
def test_a_server_is_gone_soon_after_its_owner_was_killed(tmp_path: Path, code: str) -> None:
    owner, server_process, server = started_by_another(tmp_path, code)
    end(owner)
    assert wait_until(lambda: gone(server) and gone(server_process))


def test_a_server_is_told_to_stop_before_it_is_killed(tmp_path: Path) -> None:
    owner, _, server = started_by_another(tmp_path, LAST_WORDS)
    end(owner)
    assert wait_until(lambda: gone(server))
    assert (tmp_path / "log").read_text() == "serving\ngoodbye\n"


def test_a_forked_child_of_the_owner_does_not_keep_the_server_alive(tmp_path: Path) -> None:
    owner, _, server = started_by_another(tmp_path, SERVES, before_waiting="forked = os.fork()")
    (forked,) = [child for child in psutil.Process(owner.pid).children() if "-I" not in child.cmdline()]
    owner.kill()
    ended = wait_until(lambda: gone(server))
    held_the_pipe = not gone(forked)
    forked.kill()
    end(owner)
    assert held_the_pipe
    assert ended


def test_a_ctrl_c_in_the_terminal_leaves_the_server_to_its_owner(tmp_path: Path) -> None:
    owner, server_process, server = started_by_another(tmp_path, SERVES)
    assert owner.pid not in (os.getsid(server_process.pid), os.getsid(server.pid))
    os.killpg(owner.pid, signal.SIGINT)
    said, _ = owner.communicate(timeout=WITHIN_S)
    assert said.splitlines() == ["interrupted None", f"stopped {128 + signal.SIGTERM}"]
    assert gone(server)
    assert gone(server_process)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_server_ends_when_its_watcher_is_killed(tmp_path: Path) -> None:
    server_process, server = start(tmp_path, SERVES)
    os.kill(server_process.watcher_pid, signal.SIGKILL)
    assert wait_until(lambda: gone(server))
    server_process.stop()


def test_a_server_that_ends_by_itself_is_noticed(tmp_path: Path) -> None:
    server_process = ServerProcess(
        [sys.executable, "-c", "raise SystemExit(3)"], folder=tmp_path, log=tmp_path / "log", grace_s=1
    )
    assert wait_until(lambda: server_process.exit_status() is not None)
    assert server_process.exit_status() == 3
    server_process.stop()


def test_stop_returns_when_the_server_is_gone_and_may_be_repeated(tmp_path: Path) -> None:
    server_process, server = start(tmp_path, STUBBORN, grace_s=0.2)
    server_process.stop()
    assert gone(server)
    server_process.stop()
    assert server_process.exit_status() == 128 + signal.SIGKILL
    assert "no end within 0.2 s" in server_process.log_tail()


def test_a_signal_that_comes_while_the_watcher_ends_does_not_change_the_status() -> None:
    watching = subprocess.Popen(
        [sys.executable, "-I", "-S", watcher.__file__, str(int(signal.SIGTERM)), "1", sys.executable, "-c", SERVES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert watching.stdin is not None
    assert watching.stdout is not None
    assert watching.stdout.readline() == b"serving\n"
    watching.stdin.close()
    while watching.poll() is None:
        watching.send_signal(signal.SIGTERM)
    watching.stdout.close()
    assert watching.returncode == 128 + signal.SIGTERM


def test_what_a_server_left_behind_in_its_group_ends_with_it(tmp_path: Path) -> None:
    leaves = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid, flush=True)"
    command = [sys.executable, "-c", f"{leaves}; import signal; print('serving', flush=True); signal.pause()", STUBBORN]
    server_process = ServerProcess(command, folder=tmp_path, log=tmp_path / "log", grace_s=1)
    assert wait_until(lambda: server_process.log_tail().count("serving") == 2)
    left = psutil.Process(int(re.findall(r"\d+", server_process.log_tail())[0]))
    server_process.stop()
    assert wait_until(lambda: gone(left))


def test_what_a_server_keeps_open_is_let_go_when_it_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVES]
    with accounts.claimed(tmp_path / "folder") as claim:
        server_process = ServerProcess(command, folder=tmp_path, log=tmp_path / "log", grace_s=1, keep_fd=claim)
    with pytest.raises(PartUnavailable, match="in use"), accounts.claimed(tmp_path / "folder", within_s=0):
        pass
    server_process.stop()
    with accounts.claimed(tmp_path / "folder", within_s=0):
        pass


def test_the_watcher_imports_nothing_of_ours() -> None:
    imports = f"import runpy, sys; runpy.run_path({watcher.__file__!r}); print('clawstream' in sys.modules)"
    said = subprocess.run([sys.executable, "-I", "-S", "-c", imports], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"


async def test_a_child_is_told_and_heard_and_ends_without_force(tmp_path: Path) -> None:
    code = "import sys; print(input(), flush=True); print('words', file=sys.stderr, flush=True); input()"
    child = await start_child([sys.executable, "-c", code], log=tmp_path / "log", piped=True)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b"hello\n")
    async with asyncio.timeout(WITHIN_S):
        assert await child.stdout.readline() == b"hello\n"
    assert wait_until(lambda: (tmp_path / "log").read_text() == "words\n")
    assert await end_child(child, WITHIN_S)
    assert child.returncode == -signal.SIGTERM


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_stubborn_child_is_ended_by_force_with_what_it_left_behind(tmp_path: Path, cancelled: bool) -> None:
    code = f"import os; child = os.fork(); child and print(child, flush=True); {STUBBORN}"
    child = await start_child([sys.executable, "-c", code], log=tmp_path / "log")
    assert wait_until(lambda: (tmp_path / "log").read_text().count("serving") == 2)
    left = [psutil.Process(int(pid)) for pid in re.findall(r"\d+", (tmp_path / "log").read_text())]
    if cancelled:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await end_child(child, WITHIN_S)
    else:
        assert not await end_child(child, 0.2)
    assert child.returncode == -signal.SIGKILL
    assert wait_until(lambda: all(map(gone, left)))


def test_a_server_that_does_not_get_ready_is_stopped_and_the_end_of_its_log_is_said(tmp_path: Path) -> None:
    server_process, server = start(tmp_path, SERVES)
    with (
        pytest.raises(PartUnavailable, match=r"(?s)it was not ready within 0 s\. .*Or do this\. .*serving"),
        server_process.once_ready(lambda: False, 0, name="it", instead="Or do this"),
    ):
        pass
    assert gone(server)


def test_a_server_that_ended_is_not_ready_whatever_its_log_says(tmp_path: Path) -> None:
    server_process = ServerProcess(
        [sys.executable, "-c", "raise SystemExit(3)"], folder=tmp_path, log=tmp_path / "log", grace_s=1
    )
    assert wait_until(lambda: server_process.exit_status() is not None)
    with (
        pytest.raises(PartUnavailable, match="it ended with exit status 3"),
        server_process.once_ready(lambda: True, 9, name="it", instead="Or do this"),
    ):
        pass


def test_a_server_whose_start_fails_once_it_is_ready_is_stopped(tmp_path: Path) -> None:
    server_process, server = start(tmp_path, SERVES)
    with (
        pytest.raises(OSError, match="full"),
        server_process.once_ready(lambda: True, 9, name="it", instead="Or do this"),
    ):
        raise OSError("full")
    assert gone(server)
