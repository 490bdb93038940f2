"""Feedback in a replay: what was said live, however late, is in the first sample that the replay makes of its turn."""

import asyncio

from hypothesis import given

from clawstream.events import Event, FeedbackSource, LearnsFrom, RewardWeights, SampleAssembled
from clawstream.replay.running import begin
from clawstream.stream.topics import SAMPLES, replay_topic
from tests.examples import examples
from tests.flow import Log, Oracle
from tests.unit.replay.recorded import SETTINGS, replayed, run_through, said, wanted, work, written
from tests.unit.samples.test_feedback import BAD, THUMBS, asked_twice, place, rated
from tests.unit.samples.test_flow import MOVES, SEEDS, conversation

AGAIN = replay_topic(SAMPLES, "again")


def newest(events: dict[str, Event]) -> dict[str, SampleAssembled]:
    found: dict[str, SampleAssembled] = {}
    for sample in events.values():
        if isinstance(sample, SampleAssembled):
            found[sample.turn_id] = max(found.get(sample.turn_id, sample), sample, key=place)
    return found


def live(log: Log) -> dict[str, SampleAssembled]:
    return newest(log.first_by_id(SAMPLES))


@examples(0.3)
@given(MOVES, THUMBS, SEEDS)
def test_a_replay_of_recorded_votes_comes_to_the_sample_that_holds_of_each_turn(
    moves: list[str], thumbs: list[tuple[float, int, float | None, FeedbackSource]], seed: int
) -> None:
    moves = ["ask", *(move for move in moves if move != "done"), "done"]
    flow = run_through(rated(conversation(moves), thumbs), seed)

    async def again() -> dict[str, Event]:
        log = await written(flow, partitions=1 + seed % 3)
        await replayed(log)
        return (await said(log, [AGAIN]))[AGAIN]

    events = asyncio.run(again())
    assert newest(events) == live(flow.log)
    looks = [(*place(one)[:2], one.turn_id) for one in events.values() if isinstance(one, SampleAssembled)]
    assert len(looks) == len(set(looks)), "a look's first sample is its last"


async def test_a_late_thumb_is_in_the_one_sample_that_a_replay_makes_of_its_turn() -> None:
    flow = run_through(asked_twice(after=[(0, 1.0), (0, -1.0)]), 0, Oracle(BAD))
    log = await written(flow, 3)
    await replayed(log)
    [sample] = [one for one in (await said(log, [AGAIN]))[AGAIN].values() if isinstance(one, SampleAssembled)]
    assert (sample.num_feedback, sample.reward, sample.person_reward, sample.total_reward) == (2, -1, -1.0, -1.0)


async def test_a_replay_keeps_the_weights_and_the_method_that_it_began_with() -> None:
    log = await written(run_through(asked_twice(after=[(0, 1.0)]), 0, Oracle(BAD)), 1)
    then = SETTINGS.rewards.model_copy(update={"person": 0.25})
    learns = LearnsFrom(hints=False)
    started, _ = await begin(log, wanted(), SETTINGS.judge, then, learns=learns)
    assert (started.reward_weights, started.learns) == (RewardWeights(person=0.25), learns)
    assert (await begin(log, wanted(), SETTINGS.judge, SETTINGS.rewards))[0] == started
    await work(log, started)
    [sample] = [one for one in (await said(log, [AGAIN]))[AGAIN].values() if isinstance(one, SampleAssembled)]
    assert sample.total_reward == 0.25
