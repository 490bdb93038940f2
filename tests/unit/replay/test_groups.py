"""A replay settles the groups of its range, by another judge's verdicts too, and knows late attempts and feedback."""

import asyncio
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import (
    ExchangeCompleted,
    FeedbackSource,
    GroupSettled,
    Question,
    SampleAssembled,
    SessionIdle,
    TrajectoryEnded,
    VotesFrom,
)
from clawstream.replay.running import begin
from clawstream.stream import topics
from clawstream.stream.topics import FEEDBACK, SAMPLES
from tests.examples import examples
from tests.fakes.memory_log import MemoryLog
from tests.flow import Oracle
from tests.unit.groups.attempts import attempt
from tests.unit.groups.test_trajectories import MIXED, mingled
from tests.unit.replay.recorded import SETTINGS, own, replayed, run_through, said, wanted, written
from tests.unit.samples.test_flow import SEEDS

Worth = Mapping[str, tuple[int, float, float]]
SEVERE = {Question.SCORE: ["\\boxed{-1}"], Question.HINT: ["\\boxed{-1}"]}


def worth(settled: GroupSettled) -> Worth:
    return {step.turn_id: (step.step_index, step.reward, step.advantage) for step in settled.advantages}


async def settlements(log: MemoryLog) -> list[GroupSettled]:
    """What the replay settled; each group once, of samples and attempts that stand on its own topics."""
    groups, samples = own(topics.GROUPS), own(SAMPLES)
    events = await said(log, [groups, samples])
    settled = [one for one in events[groups].values() if isinstance(one, GroupSettled)]
    there = {one.sample_id for one in events[samples].values() if isinstance(one, SampleAssembled)}
    ended = {one.event_id for one in events[groups].values() if isinstance(one, TrajectoryEnded)}
    for one in settled:
        assert {step.sample_id for step in one.advantages} <= there
        assert set(one.trajectories) <= ended
    return settled


@examples(0.3)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), SEEDS)
def test_recorded_votes_settle_as_live_whatever_the_partitions_and_workers(lengths: list[int], seed: int) -> None:
    sessions = [
        attempt(*[None] * length, session_id=f"s{n}", size=len(lengths), outcome=1.0 - n)
        for n, length in enumerate(lengths)
    ]
    flow = run_through(mingled(*sessions), seed, Oracle(MIXED), grouped=True)
    [live] = flow.log.of(GroupSettled)

    async def again(workers: int) -> list[GroupSettled]:
        log = await written(flow, partitions=1 + seed % 3)
        await replayed(log, workers=workers, grouped=True)
        return await settlements(log)

    [one], [other] = asyncio.run(again(1)), asyncio.run(again(2))
    assert one == other
    assert one.complete
    assert worth(one) == worth(live)
    assert {step.turn_id: step.reason for step in one.dropped} == {step.turn_id: step.reason for step in live.dropped}


async def test_another_judge_s_verdicts_weigh_the_steps() -> None:
    sessions = [attempt(None, None, session_id=name, outcome=score) for name, score in (("a", 1.0), ("b", 0.5))]
    flow = run_through(mingled(*sessions), 0, Oracle(MIXED), grouped=True)
    log = await written(flow, partitions=2)
    judge = Oracle(SEVERE)
    judge.name = "severe@test"
    what = wanted(votes_from=VotesFrom.NEW, judge=judge.name)
    await replayed(log, what, judge=judge, grouped=True)
    [settled] = await settlements(log)
    first = {step.turn_id: step.reward for step in settled.advantages if step.step_index == 0}
    assert sorted(first.values()) == [-0.5, 0.0]


async def test_late_words_and_attempts_are_known_from_the_start() -> None:
    one, late = (attempt(None, session_id=name, size=2, outcome=score) for name, score in (("a", 1.0), ("b", -1.0)))
    answer = one.written[0]
    flow = run_through([*one.written, *late.written], 0, Oracle(MIXED), grouped=True)
    assert isinstance(answer, ExchangeCompleted)
    turn_id = answer.exchange_id
    flow.log.append(FEEDBACK, one.rate(turn_id, -1.0, FeedbackSource.ENVIRONMENT))
    log = await written(flow, partitions=1)
    await replayed(log, grouped=True)
    [settled] = await settlements(log)
    assert settled.complete
    assert len(settled.trajectories) == 2


async def test_a_replay_under_another_method_settles_nothing_and_one_keeps_the_method_that_it_began_with() -> None:
    flow = run_through(attempt(None, outcome=1.0).written, 0, Oracle(MIXED), grouped=True)
    log = await written(flow, partitions=1)
    await replayed(log)
    assert await settlements(log) == []
    begun, _ = await begin(log, wanted(), SETTINGS.judge, SETTINGS.rewards, grouped=True)
    assert not begun.grouped


async def test_where_nobody_judges_words_and_thumbs_on_any_answer_make_samples_again() -> None:
    session = attempt(None, None, group_id=None, outcome=None)
    [answer, *_] = session.written
    assert isinstance(answer, ExchangeCompleted)
    turn_id = answer.exchange_id
    session.rate(turn_id, None, text="Show the steps first.")
    flow = run_through(session.written, 0, judged=False)
    log = await written(flow, partitions=1)
    await replayed(log, settings=SETTINGS.judge.model_copy(update={"url": None}))
    again = (await said(log, [own(SAMPLES)]))[own(SAMPLES)]
    assert again == {one.sample_id: one for one in flow.log.of(SampleAssembled)}
    assert [one.hint for one in flow.log.of(SampleAssembled)] == ["Show the steps first."]


async def test_an_attempt_that_went_on_after_a_silence_is_settled_with_all_of_its_steps() -> None:
    session = attempt(None, None, None, size=1, outcome=1.0)
    first = session.written[0]
    assert isinstance(first, ExchangeCompleted)
    idle = SessionIdle(session_id="s", after_exchange_id=first.exchange_id, idle_s=1800)
    flow = run_through([first, idle, *session.written[1:]], 0, Oracle(MIXED), grouped=True)
    log = await written(flow, partitions=1)
    await replayed(log, grouped=True)
    [settled] = await settlements(log)
    assert len(settled.advantages) + len(settled.dropped) == 3
