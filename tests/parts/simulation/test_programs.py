"""Students who are told to talk: they may take as long as they like, as long as somebody is answered."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clawstream.errors import PartUnavailable
from clawstream.simulation.runs.programs import StudentProcess

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
