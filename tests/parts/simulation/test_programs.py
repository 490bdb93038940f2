"""Students who are told to talk, and what is counted meanwhile.

They may take as long as they like, as long as somebody is answered. Updates are versions that were published; the
number of a rejected step is none.
"""

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clawstream.errors import PartUnavailable
from clawstream.simulation.runs import programs
from clawstream.simulation.runs.programs import StudentProcess, Watch
from clawstream.simulation.runs.scenarios import CASTS
from clawstream.stream.kafka.kafka_log import KafkaLog
from tests.unit.monitoring.said import activated, plan, published, rejected

ANSWER = {
    "event": "chat", "started_at_s": 0.0, "total_ms": 1.0, "ttft_ms": 1.0, "gaps": [], "failed": False,
    "first_answer": True, "num_chunks": 1,
}  # fmt: skip
WITHIN_S = 0.2


class Told:
    """A process that was started: what it is told is forgotten."""

    def __init__(self) -> None:
        async def drained() -> None: ...

        self.stdin = SimpleNamespace(write=lambda _: None, drain=drained)
        self.stdout = asyncio.StreamReader()
        self.returncode: int | None = None

    async def wait(self) -> None:
        """Run for ever."""
        await asyncio.Event().wait()

    def says(self, line: dict[str, Any]) -> None:
        self.stdout.feed_data(f"{json.dumps(line)}\n".encode())


async def held(told: Told, lines: list[dict[str, Any]]) -> StudentProcess:
    """Return the students once they were held; each line comes half the bound after the one before."""
    students = StudentProcess(cast("asyncio.subprocess.Process", told), within_s=WITHIN_S)
    async with asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(students.listen())
        holding = tasks.create_task(students.hold(100))
        for line in lines:
            await asyncio.sleep(WITHIN_S / 2)
            told.says(line)
        await asyncio.wait([holding])
        listening.cancel()
    return students


async def test_people_are_waited_for_as_long_as_somebody_is_answered() -> None:
    students = await held(Told(), [*[ANSWER] * 8, {"event": "paused"}])
    assert len(students.chats) == 8


@pytest.mark.parametrize("answers", [0, 3])
async def test_people_to_whom_nobody_says_anything_any_more_are_given_up(answers: int) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(PartUnavailable, match="got no answer")):
        await held(Told(), [ANSWER] * answers)


async def test_an_update_is_a_version_that_was_published_and_is_served() -> None:
    watch = Watch()
    for event in (
        published(0),
        activated(0),
        plan(1, (), {}),
        published(1),
        activated(1),
        plan(2, (), {}),
        rejected(2),
    ):
        watch._learn(event)
    assert (watch.updates, watch.num_rejected, watch.versions) == (1, 1, (0, 1))

    watch._learn(published(3))
    assert (watch.updates, watch.versions) == (1, (0, 1, 3))
    watch._learn(activated(3))
    assert watch.updates == 2


class Lags:
    """A log on which one stage is behind for the first few looks."""

    def __init__(self, behind: str) -> None:
        self.behind = behind
        self.asked: list[str] = []

    async def lag(self, stage: str) -> int:
        self.asked.append(stage)
        return 1 if stage == self.behind and self.asked.count(stage) < 3 else 0


@pytest.mark.parametrize("behind", ["samples", "refresh"])
async def test_all_is_quiet_once_answers_given_again_are_samples_where_hints_have_them(behind: str) -> None:
    log = Lags(behind)
    await programs.quiet(CASTS["all"], Watch(refreshes=True), cast("KafkaLog", log))
    assert log.asked == ["turns", "judging", "refresh", "samples"] * 5


async def test_a_stage_that_no_hint_needs_is_not_waited_for() -> None:
    log = Lags("refresh")
    await programs.quiet(CASTS["all"], Watch(), cast("KafkaLog", log))
    assert log.asked == ["turns", "judging", "samples"] * 3
