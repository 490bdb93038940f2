"""When the people of a run are stopped and change their minds, and by which settings its parts run."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clawstream.errors import PartUnavailable
from clawstream.simulation.opinions import Control
from clawstream.simulation.roles import Roles
from clawstream.simulation.runs import programs, run
from clawstream.simulation.runs.people import People
from clawstream.simulation.runs.run import Plan, _free_until, _judge, _next_stop, _settings, _teach

PEOPLE = People(scenario="all", hint_share=0.5, asked=Path("a"), scored=Path("b"), scored_flipped=Path("c"))
PLAN = Plan(
    people=PEOPLE, method="combined", updates=88, seed=0, folder=Path("f"), cache_dir=Path("c"), base=Path("b"),
    temperature=1.0, training={"learning_rate": 1e-3},
)  # fmt: skip


@pytest.mark.parametrize(
    ("flip_after", "score_every", "stops"),
    [
        (None, None, [88]),
        (64, None, [64, 88]),
        (None, 40, [40, 80, 88]),
        (64, 40, [40, 64, 80, 88]),
    ],
)
def test_people_are_stopped_for_each_score_for_the_flip_and_at_the_end(
    flip_after: int | None, score_every: int | None, stops: list[int]
) -> None:
    plan = replace(PLAN, flip_after=flip_after, score_every=score_every)
    found = [0]
    while found[-1] < plan.updates:
        found.append(_next_stop(plan, found[-1]))

    assert found[1:] == stops


def test_a_score_is_taken_at_the_update_that_was_asked_for_though_one_was_passed() -> None:
    plan = replace(PLAN, updates=16, score_every=4)
    assert [_next_stop(plan, reached) for reached in (0, 4, 5, 8, 13)] == [4, 8, 8, 12, 16]
    assert [_free_until(plan, target) for target in (4, 16)] == [3, 15]
    assert _free_until(replace(plan, patient=True), 4) == 4
    assert _free_until(replace(plan, score_every=None), 16) == 16


def test_the_teacher_is_the_plan_s_and_without_one_that_of_the_settings(tmp_path: Path) -> None:
    plan = replace(PLAN, folder=tmp_path)

    assert _settings(replace(plan, training={"teacher": "reference"}), 1234).training.teacher == "reference"
    assert _settings(plan, 1234).training.teacher is None
    assert _settings(plan, 1234).training.keep_checkpoints == 89  # all of them: which are scored is not known here


def test_a_pretrained_policy_has_its_own_template_and_limit_and_is_waited_for_longer(tmp_path: Path) -> None:
    people = replace(PEOPLE, scenario="everyday")
    found, usual = (
        _settings(replace(PLAN, folder=tmp_path, people=who, temperature=who.cast.temperature), 1234)
        for who in (people, PEOPLE)
    )
    assert (found.policy.renderer, found.policy.enable_thinking) == ("auto", None)
    assert (found.gateway.default_max_tokens, found.gateway.default_temperature) == (80, 0.6)
    assert (usual.policy.renderer, usual.policy.enable_thinking) == ("qwen3", False)
    assert (usual.gateway.default_max_tokens, usual.gateway.default_temperature) == (None, 1.0)
    assert people.cast.limits.update_s > 4 * PEOPLE.cast.limits.update_s


def test_a_frozen_run_alone_learns_nothing_of_what_people_say(tmp_path: Path) -> None:
    rates = {
        control: _settings(replace(PLAN, folder=tmp_path, control=control), 1234).training.learning_rate
        for control in (None, *Control)
    }
    assert rates == {None: 1e-3, Control.SHUFFLED: 1e-3, Control.COIN: 1e-3, Control.FROZEN: 0.0}


def test_the_judge_of_a_control_is_told_not_to_listen() -> None:
    said = {control: _judge(replace(PLAN, control=control), 1).command for control in (None, *Control)}
    assert said[Control.SHUFFLED][-2:] == ("--control", "shuffled")
    assert said[Control.COIN][-2:] == ("--control", "coin")
    assert "--control" not in {*said[None], *said[Control.FROZEN]}


class World:
    """Students as they are told, and the updates that come of it: of each 16 samples one, when anybody looks."""

    refreshes = False

    def __init__(self, samples: Callable[[int], float], *, by_itself: int = 0) -> None:
        self.told: list[object] = []
        self.chats: list[object] = []
        self.updates = self.activated = self.num_waiting = 0
        self._samples, self._by_itself = samples, by_itself  # of a session by update; updates that nobody asks for

    @property
    def num_planned(self) -> int:
        return self.updates

    async def listen(self) -> None: ...

    async def hold(self, num_sessions: int) -> None:
        self.told.append(num_sessions)
        self.num_waiting += int(num_sessions * self._samples(self.updates))

    async def plans_more(self, num_planned: int, *, within_s: float) -> bool:
        del within_s
        if self.num_waiting >= 16:
            self.num_waiting, self.updates = self.num_waiting - 16, self.updates + 1
        return self.updates > num_planned

    async def settle(self) -> None:
        while await self.plans_more(self.updates, within_s=0):
            pass
        await asyncio.sleep(0)

    def wait_again(self) -> None:
        pass

    async def until_settled(self) -> None:
        await self.settle()

    async def until_served(self, updates: int) -> None:
        if self._by_itself:
            self.updates += self._by_itself
        while self.updates < updates:
            await asyncio.sleep(0)

    async def pause(self) -> None:
        await self.settle()
        self.told.append(f"pause at {self.updates}")

    async def go(self) -> None:
        self.told.append("go")

    async def flip(self) -> None:
        self.told.append("flip")

    async def talk(self, talker: str) -> None:
        self.told.append(f"talk {talker}")


async def taught(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **changes: Any) -> list[object]:
    """What the students of a run were told."""

    @asynccontextmanager
    async def program(*_: str, log: Path) -> AsyncIterator[None]:
        del log
        yield

    async def quiet(*_: object) -> None:
        await world.settle()

    monkeypatch.setattr(programs, "quiet", quiet)
    for name, stand_in in (("program", program), ("StudentProcess", lambda _, **__: world)):
        monkeypatch.setattr(run, name, stand_in)
    running: Any = SimpleNamespace(addresses=SimpleNamespace(gateway="http://gateway"))
    nothing: Any = None
    live: Any = world
    plan = replace(PLAN, folder=tmp_path, **changes)
    async with asyncio.timeout(10):
        await _teach(plan, running, live, nothing, nothing, [], lambda _: None, None)
    return world.told


@pytest.mark.parametrize(
    "samples",
    [
        lambda _: 1,
        lambda _: 0.95,
        lambda update: 0.25 if update < 6 else 1,  # after a long search for complaints, each answer is complained of
        lambda update: 0.25 if update < 7 else 1,
        lambda update: 0.25 if update % 3 else 1,
    ],
)
async def test_preferences_flip_after_their_update_and_no_other_while_nobody_talks(
    samples: Callable[[int], float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = await taught(World(samples), monkeypatch, tmp_path, updates=12, flip_after=8, patient=True)

    at = told.index("flip")
    assert [word for word in told if isinstance(word, str)] == ["pause at 8", "flip", "pause at 12"]
    assert (told[at - 1], told[at + 1]) == ("pause at 8", 16)  # and they ask as many as at first


async def test_samples_that_are_left_over_and_fill_a_batch_are_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(lambda _: 1)
    world.num_waiting = 16

    assert await taught(world, monkeypatch, tmp_path, updates=2, flip_after=1, patient=True) == [
        "pause at 1", "flip", 16, "pause at 2",
    ]  # fmt: skip


async def test_where_people_do_not_wait_they_go_on_when_preferences_have_flipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = await taught(World(lambda _: 1, by_itself=2), monkeypatch, tmp_path, updates=4, flip_after=2)

    assert told == ["pause at 2", "flip", "go", "pause at 4"]


async def test_the_next_people_talk_after_the_end_of_a_block_and_no_other_while_nobody_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    people = replace(PEOPLE, scenario="blocks")
    told = await taught(World(lambda _: 0.95), monkeypatch, tmp_path, people=people, updates=6, patient=True)
    assert [word for word in told if isinstance(word, str)] == [
        "talk student", "pause at 2", "talk teacher", "pause at 4", "talk ta", "pause at 6",
    ]  # fmt: skip
    assert told[1] == 16

    people = replace(PEOPLE, scenario="unrelated")
    told = await taught(World(lambda _: 1), monkeypatch, tmp_path, people=people, updates=6, patient=True)
    assert told == ["talk student", 16, 16, "pause at 2", "talk unrelated", 16, 16, 16, 16, "pause at 6"]


async def test_a_run_whose_block_was_passed_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    people = replace(PEOPLE, scenario="blocks")
    with pytest.raises(PartUnavailable, match="after update 2, and 3 updates are served"):
        await taught(World(lambda _: 1, by_itself=3), monkeypatch, tmp_path, people=people, updates=6)


async def test_a_run_that_learned_past_its_flip_fails_and_says_where_it_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(PartUnavailable, match="after update 8, and 9 updates are served"):
        await taught(World(lambda _: 1, by_itself=9), monkeypatch, tmp_path, updates=12, flip_after=8)


async def test_fewer_sessions_are_held_at_a_time_with_people_whose_sessions_give_several_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(lambda _: 4)
    who = replace(PLAN.people, roles=Roles(people="m@http://x/v1"))
    told = await taught(world, monkeypatch, tmp_path, people=who, updates=2, patient=True)
    assert [word for word in told if isinstance(word, int)] == [4, 4]
