"""Teachers' scores in a replay: those on the log weigh the hints that they were made of, and no others."""

import asyncio

from hypothesis import given, settings

from clawstream.events import Event, Question, RefusalReason, SampleAssembled, SampleRefused, VotesFrom
from clawstream.stream.topics import replay_topic
from tests.flow import Oracle, Tutor
from tests.replay.recorded import lived, replayed, said, wanted, written
from tests.samples.test_flow import MOVES, SEEDS, conversation
from tests.samples.test_teacher import HINTED, judge, one_turn
from tests.sessions import SAMPLES

AGAIN = replay_topic(SAMPLES, "again")


@settings(max_examples=30, deadline=None)
@given(MOVES, SEEDS)
def test_a_replay_of_recorded_votes_gives_the_samples_with_the_scores_that_were_recorded(
    moves: list[str], seed: int
) -> None:
    tutor = Tutor(too_long=9)
    flow = lived(conversation(["ask", *moves]), seed, teacher=tutor)
    num_asked = len(tutor.asked)

    async def again() -> dict[str, Event]:
        log = await written(flow, partitions=1 + seed % 3)
        await replayed(log, teacher=tutor.name)
        return (await said(log, [AGAIN]))[AGAIN]

    events = asyncio.run(again())
    assert samples(events) == samples(flow.log.first_by_id(SAMPLES))
    assert len(tutor.asked) == num_asked


def samples(events: dict[str, Event]) -> dict[str, Event]:
    return {id_: event for id_, event in events.items() if isinstance(event, SampleAssembled)}


async def test_another_judges_hint_is_not_weighed_by_what_was_said_of_the_first_ones() -> None:
    flow = lived(one_turn().written, 0, judge(0), teacher=Tutor())
    log = await written(flow, 1)
    other = Oracle({Question.SCORE: ["\\boxed{0}"], Question.HINT: [HINTED.replace("headings", "capitals")]})
    await replayed(log, wanted(votes_from=VotesFrom.NEW, judge=other.name), judge=other, teacher=Tutor.name)
    [refused] = (await said(log, [AGAIN]))[AGAIN].values()
    assert isinstance(refused, SampleRefused)
    assert refused.reason is RefusalReason.HINT_UNSCORED
