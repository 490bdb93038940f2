"""Answers given again in a replay: what is on the log is used as it stands, and nobody is asked."""

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import Event, SampleAssembled, VotesFrom
from clawstream.stream.topics import ANSWERS, SAMPLES
from tests.examples import examples
from tests.flow import Flow, Oracle
from tests.unit.refresh.refresher import HINT, FakeRefresher, of_refreshed, too_late
from tests.unit.replay.recorded import own, replayed, said, wanted, written
from tests.unit.samples.test_flow import MOVES, SEEDS, conversation


def run_through(moves: list[str], seed: int) -> Flow:
    """A log with further answers for hints, and one for each sample besides."""
    flow = Flow(refresher=FakeRefresher(3), answers_per_hint=2)
    log = flow.run(conversation(["ask", *moves, "ask"]), random.Random(seed))
    hinted = [one for one in log.of(SampleAssembled) if one.hint is not None and one.refreshed_id is None]
    flow.run(map(too_late, hinted), random.Random(seed))
    return flow


@examples(0.3)
@given(MOVES, SEEDS, st.sampled_from([1, 3]))
def test_a_replay_of_recorded_votes_makes_the_same_samples_of_them(
    moves: list[str], seed: int, partitions: int
) -> None:
    flow = run_through(moves, seed)

    async def again() -> dict[str, Event]:
        log = await written(flow, partitions)
        await replayed(log)
        return (await said(log, [own(SAMPLES)]))[own(SAMPLES)]

    assert asyncio.run(again()) == flow.log.first_by_id(SAMPLES)


async def test_another_judges_hint_scores_the_answers_that_were_given_then() -> None:
    flow = Flow(Oracle(HINT), refresher=FakeRefresher(), answers_per_hint=3)
    flow.run(conversation(["ask", "ask"]))
    log = await written(flow, 1)
    other = Oracle({**HINT, next(reversed(HINT)): ["\\boxed{1} [HINT_START]Say it in plain words.[HINT_END]"]})
    other.name = "another@test"
    await replayed(log, wanted(votes_from=VotesFrom.NEW, judge=other.name), judge=other)

    found = of_refreshed((await said(log, [own(SAMPLES)]))[own(SAMPLES)].values())
    answers = flow.log.first_by_id(ANSWERS)
    assert {one.refreshed_id for one in found} == set(answers)
    assert {(one.judge, one.hint) for one in found} == {("another@test", "Say it in plain words.")}
