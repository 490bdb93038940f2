"""People who wait ask for one batch at a time, and for the next once what they said is in the weights that answer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from clawstream.errors import PartUnavailable
from clawstream.events import StepTaken
from clawstream.simulation.runs import programs
from clawstream.simulation.runs.programs import Watch
from clawstream.simulation.runs.scenarios import CASTS
from tests.unit.monitoring.said import activated, plan, published
from tests.unit.projections.logs import example

BATCH = CASTS["all"].batch_samples


class World:
    """People of whose sessions every `one_in`th gives a sample at once, and a trainer that needs a while for a step."""

    def __init__(self, *, one_in: int = 1, answers_per_hint: int = 1, session_s: float = 0.0) -> None:
        self.watch = Watch(refreshes=answers_per_hint > 1)
        for event in (published(0), activated(0)):
            self.watch._learn(event)
        self.asked_while_trained = False
        self.asked: list[int] = []
        self.num_looks = 0  # at how far the stages are
        self._one_in = one_in
        self._session_s = session_s
        self._num_samples = 0
        self._came = asyncio.Event()

    async def hold(self, num_sessions: int) -> None:
        self.asked_while_trained |= not self.watch.settled
        before = sum(self.asked)
        self.asked.append(num_sessions)
        await asyncio.sleep(num_sessions * self._session_s)
        self._num_samples += (before + num_sessions) // self._one_in - before // self._one_in
        self._came.set()

    async def lag(self, _stage: str) -> int:
        self.num_looks += 1
        return 0

    async def _train(self) -> None:
        while True:
            await self._came.wait()
            self._came.clear()
            while self._num_samples >= BATCH:
                self._num_samples -= BATCH
                version = self.watch.activated + 1
                await self._tell(plan(version, (), {}))
                await asyncio.sleep(0.02)
                await self._tell(example(StepTaken, policy_version=version))
                await self._tell(published(version))
                await asyncio.sleep(0.02)
                await self._tell(activated(version))

    async def _tell(self, event: object) -> None:
        async with self.watch._changed:
            self.watch._learn(event)
            self.watch._changed.notify_all()

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._train())
        try:
            async with asyncio.timeout(60):
                yield
        finally:
            task.cancel()

    async def live(self, updates: int) -> None:
        async with self.training():
            await programs.batches(updates, CASTS["all"], self, self.watch, self)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _a_quick_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PLANNED_WITHIN_S", 0.1)


async def test_a_full_batch_is_waited_for_by_its_weights_alone() -> None:
    world = World()
    await world.live(3)

    assert world.asked == [BATCH] * 3
    assert not world.asked_while_trained
    assert world.num_looks == 0
    assert world.watch.activated == 3


@pytest.mark.slow
async def test_where_few_sessions_teach_more_are_held_until_a_batch_is_full_and_no_more_updates_are_made() -> None:
    world = World(one_in=3)
    await world.live(3)

    assert sum(world.asked) >= 3 * BATCH * 3
    assert not world.asked_while_trained
    assert world.watch.activated == 3


@pytest.mark.slow
async def test_however_long_a_batch_takes_to_fill_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PLANNED_WITHIN_S", 0.02)
    monkeypatch.setattr(programs, "AT_A_TIME", 1)
    world = World(one_in=4, session_s=0.05)
    world.watch.within_s = 2.3
    began_s = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.live(3))  # for the second people would begin with two batches' worth
        await world.watch.until_served(3)

    assert asyncio.get_running_loop().time() - began_s > 4.6
    assert max(world.asked) <= BATCH


@pytest.mark.slow
async def test_people_who_are_content_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SESSIONS_A_SAMPLE", 3)
    world = World(one_in=1_000)
    with pytest.raises(PartUnavailable, match=r"sessions in a row made no batch of 16 samples for update 1"):
        await world.live(1)

    assert 3 * BATCH <= sum(world.asked) < 4 * BATCH


async def test_where_answers_are_given_again_all_stages_are_waited_for() -> None:
    world = World(answers_per_hint=4)
    await world.live(2)

    assert world.num_looks > 0
    assert not world.asked_while_trained
