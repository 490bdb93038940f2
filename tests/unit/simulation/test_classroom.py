"""Simulated people start when they are told to, and say when nobody talks any more."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from clawstream.simulation import student
from clawstream.simulation.reactions import PersonTask, flip
from clawstream.simulation.student import StudentPool

SUMS = [PersonTask(persona="student", question="1 + 1", answer="2", flipped="ta")] * 3
MIXED = [PersonTask(persona=who, question="1 + 1", answer="2") for who in ("student", "teacher", "ta")]
MIXED.append(PersonTask(persona="student", question="what now?", answer="", subject="presents"))


class Talker:
    """A student whose sessions last until they are let end."""

    def __init__(self) -> None:
        self.num_held = self.num_open = 0
        self.wishes: list[str] = []
        self.speakers: list[str] = []
        self.may_end = asyncio.Event()

    async def chat(self, session: str, task: PersonTask, rng: random.Random) -> bool:
        """Hold a session."""
        del session, rng
        self.wishes.append(task.wish)
        self.speakers.append(task.speaker)
        self.num_held, self.num_open = self.num_held + 1, self.num_open + 1
        await self.may_end.wait()
        await asyncio.sleep(0)
        self.num_open -= 1
        return True


@asynccontextmanager
async def classroom(
    talker: Talker, *, waits: bool, seats: int = 4, sums: Sequence[PersonTask] = SUMS
) -> AsyncIterator[StudentPool[PersonTask]]:
    """Open, with so many seats."""
    room = StudentPool(
        talker, sums, seed=0, num_sessions=None, waits=waits, flipped=flip, speaker=lambda task: task.speaker
    )
    running = asyncio.create_task(room.run(seats))
    yield room
    talker.may_end.set()
    room.stop()
    await asyncio.wait_for(running, 5)


async def settled() -> None:
    """Every task that can go on has."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_is_made_on_the_way_is_asked_once_and_a_list_again_and_again() -> None:
    talker = Talker()
    talker.may_end.set()
    room = StudentPool(talker, iter(SUMS), seed=0, num_sessions=None)
    await asyncio.wait_for(room.run(2), 5)
    assert talker.num_held == len(SUMS)

    room = StudentPool(talker, SUMS, seed=0, num_sessions=2 * len(SUMS))
    await asyncio.wait_for(room.run(2), 5)
    assert talker.num_held == 3 * len(SUMS)


@pytest.mark.parametrize(("num", "seats"), [(1, 4), (40, 1), (4, 4), (5, 4), (11, 3)])
async def test_so_many_sessions_are_held_as_are_asked_for_and_then_it_says_so(
    num: int, seats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []
    monkeypatch.setattr(student, "say", said.append)
    talker = Talker()
    async with classroom(talker, waits=True, seats=seats) as room:
        await settled()
        assert talker.num_held == 0
        for round_ in (1, 2):
            talker.may_end.clear()
            holding = asyncio.create_task(room.obey(f"go {num}"))
            await settled()
            assert talker.num_open == min(num, seats)
            assert len(said) == round_ - 1
            talker.may_end.set()
            await asyncio.wait_for(holding, 5)
            assert (talker.num_held, talker.num_open, len(said)) == (round_ * num, 0, round_)


async def test_a_pause_is_over_only_once_no_session_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(student, "say", said.append)
    talker = Talker()
    async with classroom(talker, waits=False) as room:
        await settled()
        pausing = asyncio.create_task(room.obey("pause"))
        await settled()
        assert (talker.num_open, said) == (4, [])
        talker.may_end.set()
        await asyncio.wait_for(pausing, 5)
        assert (talker.num_held, talker.num_open, len(said)) == (4, 0, 1)
        talker.may_end.clear()
        await room.obey("go")
        await settled()
        assert talker.num_open == 4


async def test_after_a_flip_the_sessions_that_start_want_what_their_line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student, "say", lambda _: None)
    talker = Talker()
    talker.may_end.set()
    async with classroom(talker, waits=True) as room:
        for command in ("go 2", "flip", "go 3"):
            await asyncio.wait_for(room.obey(command), 5)

    assert talker.wishes == ["student"] * 2 + ["ta"] * 3


async def test_who_is_told_to_talk_alone_starts_sessions_until_another_is() -> None:
    talker = Talker()
    talker.may_end.set()
    async with classroom(talker, waits=True, sums=MIXED) as room:
        for command in ("go 8", "talk ta", "go 3", "talk unrelated", "go 2", "talk student", "go 3"):
            await asyncio.wait_for(room.obey(command), 5)

    assert talker.speakers == ["student", "teacher", "ta", "unrelated"] * 2 + ["ta"] * 3 + ["unrelated"] * 2 + (
        ["student"] * 3
    )


@pytest.mark.parametrize("command", ["go 0", "go -1", "go two", "stay", "talk", "talk nobody", "talk teacher"])
async def test_an_unknown_command_changes_nothing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    talker = Talker()
    async with classroom(talker, waits=True) as room:
        await room.obey(command)
        await settled()
        assert talker.num_held == 0
    assert f"unknown command '{command}'" in capsys.readouterr().err
