"""How the processes of a trainer find each other, tell their errors, and end."""

import os
import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from clawstream.config import TrainingSettings
from clawstream.training.processes import JOIN_S, Ranks
from clawstream.training.stepping import _start
from tests.parts.training.parallel.conftest import forked_processes
from tests.parts.training.parallel.test_trainers import running

pytestmark = pytest.mark.timeout(300)  # the processes' first imports take half a minute on a busy machine

WAITING = "tests.parts.training.processes.waiting"
PARENT = """
import signal
from clawstream.training.processes import Processes, Start
def work(state):
    print("at work\\n", end="", flush=True)  # one write: both processes have one output
    signal.pause()
if __name__ == "__main__":
    processes = Processes(2, Start(backend="gloo", threads=1))
    print(*processes.pids, flush=True)
    processes.ask("parent:work")
"""


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them_however_it_ends(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert parent.stdout.readline() == "at work\n"
        at_work = [psutil.Process(pid) for pid in pids]
        parent.kill()
    assert psutil.wait_procs(at_work, timeout=60)[1] == []


@pytest.mark.slow
def test_processes_that_are_stuck_are_ended_together() -> None:
    processes = forked_processes(3)
    processes.ask(f"{WAITING}:nothing")
    pids = processes.pids
    for _, connection in processes._members:
        connection.send((f"{WAITING}:sleep", (60.0,)))

    started_s = time.monotonic()
    processes.close()

    assert time.monotonic() - started_s < 2 * JOIN_S, "one after the other it would be three times JOIN_S"
    assert not any(map(running, pids))


@pytest.mark.slow
def test_processes_find_each_other_on_this_machine_alone() -> None:
    with closing(forked_processes(2)) as processes:
        assert {name for names in processes.ask(f"{WAITING}:interfaces") for name in names} == {"lo"}


@pytest.mark.slow
def test_an_error_of_the_first_of_torchruns_processes_is_said_though_others_wait_for_it() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    told = subprocess.run(
        [*launcher, "-m", WAITING, "fail_in_the_first"], capture_output=True, text=True, check=False, timeout=200,
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    assert told.returncode == 1
    [said] = [line for line in told.stderr.splitlines() if line.startswith("waiting: ") and "process 0. First" in line]
    assert re.search(
        r"1 \(\S+, pid \d+\) can't be reached by process 0. First error: process 0: .*2 GB were wanted", said
    )


class TwoRanks:
    """Two processes of torchrun's, as far as a team asks them to begin; they keep what they were asked."""

    count = 2

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def ask(self, _work: str, *args: Any) -> list[None]:
        self.asked.append(args)
        return [None, None]


def test_a_plan_for_another_number_of_processes_is_executed_by_those_that_torchrun_started(base: Path) -> None:
    ranks = TwoRanks()
    for planned in (1, 3):
        _start(base, TrainingSettings(processes=planned), None, cast("Ranks", ranks))
    assert [settings.processes for _, settings, _ in ranks.asked] == [2, 2]
