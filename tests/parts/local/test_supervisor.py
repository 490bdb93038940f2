"""Parts are kept running, given up with a reason, and gone when their supervisor is."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from clawstream.errors import PartUnavailable
from clawstream.local.running import read_parts
from clawstream.local.supervisor import Part, Patience, Supervisor
from tests.parts.local.test_server_process import LAST_WORDS, SERVES, STUBBORN, WITHIN_S, gone, wait_until

SOON = Patience(ready_within_s=WITHIN_S, stop_within_s=2.0, steady_after_s=60.0, first_wait_s=0.01, start_tries=3)
OWNER = """
import asyncio, signal, sys, uvloop
from pathlib import Path
from clawstream.local.supervisor import Part, Supervisor
folder, *codes = sys.argv[1:]
parts = [Part(name=str(number), command=(sys.executable, "-c", code)) for number, code in enumerate(codes)]
async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    async with Supervisor(Path(folder), environment={}, say=print) as supervisor:
        await supervisor.start(parts)
        print(*(child.process.pid for child in supervisor.children.values()), flush=True)
        await stop.wait()
        print("stopping", *(child.running for child in supervisor.children.values()), flush=True)
    print("stopped", flush=True)
uvloop.run(main())
"""


def part(name: str, code: str, **how: object) -> Part:
    return Part(name=name, command=(sys.executable, "-c", code), **how)  # type: ignore[arg-type]


@asynccontextmanager
async def supervising(folder: Path, patience: Patience = SOON) -> AsyncIterator[Supervisor]:
    async with Supervisor(folder, environment=os.environ, say=lambda _: None, patience=patience) as supervisor:
        yield supervisor


def words(supervisor: Supervisor, name: str) -> str:
    return supervisor.log_of(name).read_text()


async def until(holds: Callable[[], bool]) -> None:
    assert await asyncio.to_thread(wait_until, holds)


async def serving(supervisor: Supervisor, name: str, times: int = 1) -> psutil.Process:
    # A child may write its first line before the supervisor knows its process: until then it is not `running`.
    child = supervisor.children[name]
    await until(lambda: child.running and words(supervisor, name).count("serving") >= times)
    process = child.process
    assert process is not None
    return psutil.Process(process.pid)


def started_by_another(folder: Path, *codes: str) -> tuple["subprocess.Popen[str]", list[psutil.Process]]:
    command = [sys.executable, "-c", OWNER, str(folder), *codes]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert owner.stdout is not None
    children = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    for number in range(len(codes)):
        log = folder / "logs" / f"{number}.log"
        assert wait_until(lambda log=log: "serving" in log.read_text())  # type: ignore[misc]
    return owner, children


async def test_a_part_that_dies_is_started_again(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await supervisor.start([part("turns", SERVES, missing=_at_once)])
        first = await serving(supervisor, "turns")
        first.kill()
        second = await serving(supervisor, "turns", times=2)
        assert second.pid != first.pid
        assert supervisor.children["turns"].restarts == 1
        assert not supervisor.failed.is_set()


async def test_a_part_that_was_ready_once_is_never_given_up(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await supervisor.start([part("turns", SERVES, missing=_at_once)])
        for times in range(1, 6):
            (await serving(supervisor, "turns", times)).kill()
        await serving(supervisor, "turns", 6)
        assert supervisor.children["turns"].restarts == 5


def test_restarts_come_after_growing_waits_up_to_the_longest() -> None:
    waits = [Patience().restart_wait_s(deaths) for deaths in range(12)]
    assert waits[:4] == [0.0, 0.5, 1.0, 2.0]
    assert waits == sorted(waits)
    assert waits[-1] == Patience().restart_wait_s(10_000) == 30.0


async def test_a_part_that_never_gets_ready_fails_with_the_end_of_its_log(tmp_path: Path) -> None:
    async def never() -> str | None:
        return "no engine answers"

    patience = Patience(ready_within_s=0.3, stop_within_s=2.0)
    says = "print('the model is missing', flush=True); " + SERVES
    with pytest.raises(PartUnavailable, match=r"(?s)engine was not ready within 0\.3 s.*the model is missing"):
        async with supervising(tmp_path, patience) as supervisor:
            await supervisor.start([part("engine", says, missing=never)])


async def test_what_a_part_waits_for_is_said_when_it_changes_and_at_the_end(tmp_path: Path) -> None:
    reasons = iter(["engine away", "engine away", "engine loads"])
    told: list[str] = []

    async def missing() -> str | None:
        return next(reasons, "engine unfit")

    patience = Patience(ready_within_s=1.0, stop_within_s=2.0, silent_s=0.0)
    with pytest.raises(PartUnavailable, match=r"not ready within 1 s \(engine unfit\)\. The end of its log"):
        async with Supervisor(tmp_path, environment=os.environ, say=told.append, patience=patience) as supervisor:
            await supervisor.start([part("gateway", SERVES, missing=missing)])
    assert told == [f"gateway is not ready yet: engine {state}" for state in ("away", "loads", "unfit")]


async def test_a_part_that_dies_at_each_start_fails_with_its_exit_code(tmp_path: Path) -> None:
    async def never() -> str | None:
        return "no engine answers"

    dies = "print('port 1 is taken'); raise SystemExit(2)"
    with pytest.raises(PartUnavailable, match=r"(?s)engine exited with 2 3 times.*port 1 is taken"):
        async with supervising(tmp_path) as supervisor:
            await supervisor.start([part("engine", dies, missing=never)])


async def test_a_stage_that_dies_at_each_start_ends_the_whole_with_a_reason(tmp_path: Path) -> None:
    end = tmp_path / "end"
    dies = (
        f"import pathlib\nwhile not pathlib.Path({str(end)!r}).exists(): pass\nprint('no judge'); raise SystemExit(2)"
    )
    async with supervising(tmp_path) as supervisor:
        await supervisor.start([part("judging", dies), part("turns", SERVES)])
        end.touch()
        await asyncio.wait_for(supervisor.failed.wait(), WITHIN_S)
        assert "judging exited with 2 3 times" in supervisor.failure()
        assert "no judge" in supervisor.failure()
        assert supervisor.children["turns"].running


async def test_a_part_that_stopped_for_a_person_to_look_stays_down_and_the_others_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    stops = "print('set 12 of the last 90 records aside'); raise SystemExit(3)"
    async with Supervisor(tmp_path, environment=os.environ, say=said.append, patience=SOON) as supervisor:
        await supervisor.start([part("turns", SERVES), part("judging", stops)])
        await until(lambda: supervisor.children["judging"].failure is not None)
        await serving(supervisor, "turns")
        states = {state.name: state for state in read_parts(tmp_path)}
        assert not supervisor.failed.is_set()
        assert supervisor.children["turns"].running
    assert [states["judging"].pid, states["judging"].restarts] == [None, 0]
    assert states["judging"].failure == "exited with 3 and stays down until a person has looked"
    assert len([words for words in said if "set 12 of the last 90 records aside" in words]) == 1


async def test_a_command_that_does_not_exist_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(PartUnavailable, match="engine can't be started"):
        async with supervising(tmp_path) as supervisor:
            await supervisor.start([Part(name="engine", command=(str(tmp_path / "nothing"),))])


async def test_what_was_started_last_is_gone_before_the_rest_is_told_to_stop(tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = f"""
import signal, sys, pathlib
def told(*_):
    with pathlib.Path({str(told)!r}).open("a") as file:
        file.write(sys.argv[1] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
print("serving", flush=True)
signal.pause()
"""
    async with supervising(tmp_path) as supervisor:
        for names in (["engine"], ["turns", "samples"], ["gateway"]):
            await supervisor.start([Part(name=n, command=(sys.executable, "-c", code, n)) for n in names])
        for name in ("engine", "turns", "samples", "gateway"):
            await serving(supervisor, name)
    order = told.read_text().split()
    assert [order[0], order[-1], sorted(order[1:3])] == ["gateway", "engine", ["samples", "turns"]]


async def test_a_stop_leaves_nothing_behind_not_even_grandchildren_or_the_deaf(tmp_path: Path) -> None:
    leaves = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid, flush=True)"
    with_child = Part(name="parent", command=(sys.executable, "-c", f"{leaves}; {SERVES}", STUBBORN))
    patience, others = Patience(stop_within_s=0.3), set(psutil.Process().children())
    async with supervising(tmp_path, patience) as supervisor:
        await supervisor.start([with_child, part("deaf", STUBBORN), part("dying", "pass")])
        parent, deaf = await serving(supervisor, "parent", times=2), await serving(supervisor, "deaf")
        grandchild = psutil.Process(int(words(supervisor, "parent").splitlines()[0]))
    assert all([gone(parent), gone(deaf)])
    await until(lambda: gone(grandchild))
    assert set(psutil.Process().children()) - others == set()


async def test_what_a_part_that_died_left_behind_is_gone_before_it_is_started_again(tmp_path: Path) -> None:
    leaves = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid, flush=True)"
    with_child = Part(name="parent", command=(sys.executable, "-c", f"{leaves}; {SERVES}", SERVES), missing=_at_once)
    async with supervising(tmp_path) as supervisor:
        await supervisor.start([with_child])
        parent = await serving(supervisor, "parent", times=2)
        grandchild = psutil.Process(int(words(supervisor, "parent").splitlines()[0]))
        parent.kill()
        await until(lambda: gone(grandchild))


@pytest.mark.parametrize("num_steps", range(0, 30, 3))
async def test_a_part_that_is_stopped_while_it_starts_leaves_nothing_behind(tmp_path: Path, num_steps: int) -> None:
    others = set(psutil.Process().children())
    async with supervising(tmp_path) as supervisor:
        starting = asyncio.create_task(supervisor.start([part(str(number), SERVES) for number in range(2)]))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        starting.cancel()
    await until(lambda: set(psutil.Process().children()) <= others)


async def test_parts_json_says_how_each_part_fares(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await supervisor.start([part("turns", SERVES, missing=_at_once)])
        first = await serving(supervisor, "turns")
        (before,) = read_parts(tmp_path)
        first.kill()
        second = await serving(supervisor, "turns", times=2)
        (after,) = read_parts(tmp_path)
    (stopped,) = read_parts(tmp_path)
    assert (before.name, before.pid, before.restarts) == ("turns", first.pid, 0)
    assert (after.pid, after.restarts) == (second.pid, 1)
    assert stopped.pid is None
    assert before.since_ms <= after.since_ms <= stopped.since_ms


async def test_parts_run_on_and_are_started_again_where_parts_json_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "parts.json").mkdir()
    async with supervising(tmp_path) as supervisor:
        await supervisor.start([part("turns", SERVES, missing=_at_once)])
        (await serving(supervisor, "turns")).kill()
        await serving(supervisor, "turns", times=2)
        assert not supervisor.failed.is_set()


def test_no_parts_are_known_of_a_folder_that_no_supervisor_had(tmp_path: Path) -> None:
    assert read_parts(tmp_path) == ()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_parts_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    owner, children = started_by_another(tmp_path, SERVES, STUBBORN)
    owner.kill()
    owner.communicate(timeout=WITHIN_S)
    assert wait_until(lambda: all(gone(child) for child in children))


def test_a_ctrl_c_reaches_the_supervisor_alone_which_stops_its_parts(tmp_path: Path) -> None:
    owner, children = started_by_another(tmp_path, LAST_WORDS, LAST_WORDS)
    assert owner.pid not in {os.getsid(child.pid) for child in children}
    os.killpg(owner.pid, signal.SIGINT)
    said, _ = owner.communicate(timeout=WITHIN_S)
    assert said.splitlines() == ["stopping True True", "stopped"]
    assert owner.returncode == 0
    assert all(gone(child) for child in children)
    assert [(tmp_path / "logs" / f"{number}.log").read_text() for number in (0, 1)] == ["serving\ngoodbye\n"] * 2


async def _at_once() -> str | None:
    return None
