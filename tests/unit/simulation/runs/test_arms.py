"""The arms of a run with agents differ in what rewards count, and in nothing else; each takes as many steps."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from clawstream.config import Settings, TrainingSettings
from clawstream.errors import PartUnavailable
from clawstream.events import Event, GroupSettled, StepAdvantage, StepTaken
from clawstream.simulation.problems import MAX_STEPS
from clawstream.simulation.runs import programs
from clawstream.simulation.runs.people import people_of
from clawstream.simulation.runs.programs import Watch
from clawstream.simulation.runs.run import Method, Plan, _settings
from clawstream.simulation.runs.scenarios import CASTS, STEPS_A_ROUND, blended
from clawstream.stream.stage import Record
from tests.unit.monitoring.said import activated, plan, published
from tests.unit.projections.logs import example


def settings(method: Method, folder: Path) -> Settings:
    people = people_of("tools", folder)
    plan = Plan(
        people=people, method=method, updates=4, seed=0, folder=folder, cache_dir=folder, base=folder, temperature=1.0,
        training={"learning_rate": 1e-3},
    )  # fmt: skip
    return _settings(plan, 1)


def test_outcome_is_stepwise_with_verdicts_that_do_not_count(tmp_path: Path) -> None:
    both, alone = settings("stepwise", tmp_path), settings("outcome", tmp_path)

    assert (both.training.method, both.rewards.judge, both.rewards.environment) == ("stepwise", 1.0, 1.0)
    assert alone.rewards.judge == 0.0
    assert alone.model_copy(update={"rewards": both.rewards}) == both


def test_a_person_s_own_w_binary_of_0_is_not_that_of_runs_which_learn_from_rewards_alone(tmp_path: Path) -> None:
    own = Settings(environment=False, training={"w_binary": 0.0})

    whole = blended(settings("stepwise", tmp_path), own)

    assert TrainingSettings(**whole.training.model_dump()).w_binary == 1.0


def test_as_many_verdicts_on_steps_are_wrong_as_votes(tmp_path: Path) -> None:
    assert settings("stepwise", tmp_path).judge.votes == 1


class World:
    """Agents, each attempt of theirs a step longer than the one before as far as may be, and a late trainer."""

    def __init__(self, *, late_s: float = 0.0, failing: int | None = None) -> None:
        self.watch = Watch()
        self.watch._learn(published(0))
        self.chats: list[SimpleNamespace] = []
        self.num_attempts = 0
        self._late_s, self._failing = late_s, failing  # which request
        self._events: list[Event] = []
        self._waiting: list[str] = []
        self._training: asyncio.Task[None] | None = None

    async def hold(self, num_sessions: int) -> None:
        for _ in range(num_sessions):
            for _ in range(1 + self.num_attempts % MAX_STEPS):
                self._waiting.append(f"step {len(self.chats)}")
                self.chats.append(SimpleNamespace(failed=len(self.chats) == self._failing))
            self.num_attempts += 1
        steps = tuple(example(StepAdvantage, sample_id=name) for name in self._waiting)
        self._events.append(example(GroupSettled, group_id=f"task {self.num_attempts}", advantages=steps))
        self._training = self._training or asyncio.create_task(self._train())

    async def _train(self) -> None:
        while True:
            await asyncio.sleep(self._late_s)
            if len(self._waiting) >= 32 and len(self.chats) >= STEPS_A_ROUND * len(self.watch.rounds):
                batch, self._waiting = self._waiting[:32], self._waiting[32:]
                version = self.watch.activated + 1
                planned = replace(plan(version, (), {}), sample_ids=tuple(batch))
                self._events.append(planned)
                async with self.watch._changed:
                    for event in (
                        planned, example(StepTaken, policy_version=version), published(version), activated(version)
                    ):  # fmt: skip
                        self.watch._learn(event)
                    self.watch._changed.notify_all()

    async def lag(self, _stage: str) -> int:
        return 0

    async def follow(self, _topics: object, *, until_end: bool) -> AsyncIterator[list[Record]]:
        assert until_end
        yield [
            Record(topic="t", partition=0, offset=n, timestamp_ms=0, key="k", event=event)
            for n, event in enumerate(self._events)
        ]

    async def live(self, num_rounds: int) -> None:
        try:
            async with asyncio.timeout(20):
                await programs.steps(num_rounds, 4, CASTS["tools"], self, self.watch, self)  # type: ignore[arg-type]
        finally:
            if self._training is not None:
                self._training.cancel()  # all tests have one event loop, which it would keep busy


@pytest.mark.parametrize("num_rounds", [1, 3])
async def test_every_round_has_its_steps_and_at_most_those_of_a_group_more(num_rounds: int) -> None:
    world = World()
    await world.live(num_rounds)

    assert 0 <= len(world.chats) - num_rounds * STEPS_A_ROUND < 4 * MAX_STEPS
    assert world.num_attempts % 4 == 0
    assert world.watch.reached == num_rounds


async def test_a_round_ends_with_all_that_its_steps_taught_however_late_the_trainer_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "PLANNED_WITHIN_S", 0.01)
    world = World(late_s=0.5)
    await world.live(2)

    assert world.watch.rounds == (0, 3, 6)


async def test_a_batch_that_is_never_planned_ends_the_run() -> None:
    world = World(late_s=60)
    world.watch.within_s = 0.5
    with pytest.raises(PartUnavailable, match="no plan of batch 1, whose samples are there, within"):
        await world.live(1)


async def test_a_request_that_failed_is_no_step_and_ends_the_run() -> None:
    world = World(failing=2)

    with pytest.raises(PartUnavailable, match=r"1 of \d+ requests of agents failed in round 1"):
        await world.live(1)
    assert world.watch.reached == 0


def test_before_the_first_round_is_over_none_is_whatever_the_trainer_made() -> None:
    watch = Watch()
    watch.begin_rounds()
    watch._learn(published(1))
    watch.activated = 1

    assert (watch.updates, watch.reached) == (1, 0)
