"""Teachers' scores in a replay: those on the log weigh the hints that they were made of, and no others."""

import asyncio
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from clawstream.events import Event, Question, RefusalReason, SampleAssembled, SampleRefused, TeacherScored, VotesFrom
from clawstream.replay.work import ReplayWorker
from clawstream.stream.topics import HINTS, SAMPLES, replay_topic
from tests.examples import examples
from tests.flow import Oracle, Tutor
from tests.unit.replay.recorded import replayed, run_through, said, wanted, written
from tests.unit.samples.test_flow import MOVES, SEEDS, conversation
from tests.unit.samples.test_teacher import HINTED, judge, one_turn

AGAIN = replay_topic(SAMPLES, "again")


@examples(0.3)
@given(MOVES, SEEDS)
def test_a_replay_of_recorded_votes_gives_the_samples_with_the_scores_that_were_recorded(
    moves: list[str], seed: int
) -> None:
    tutor = Tutor(too_long=9)
    flow = run_through(conversation(["ask", *moves]), seed, teacher=tutor)
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
    flow = run_through(one_turn().written, 0, judge(0), teacher=Tutor())
    log = await written(flow, 1)
    other = Oracle({Question.SCORE: ["\\boxed{0}"], Question.HINT: [HINTED.replace("headings", "capitals")]})
    await replayed(log, wanted(votes_from=VotesFrom.NEW, judge=other.name), judge=other, teacher=Tutor().name)
    [refused] = (await said(log, [AGAIN]))[AGAIN].values()
    assert isinstance(refused, SampleRefused)
    assert refused.reason is RefusalReason.HINT_UNSCORED


async def test_a_replay_keeps_what_its_own_teacher_said_alone_and_small_and_only_until_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flow = run_through(one_turn().written, 0, judge(0), teacher=Tutor())
    [scored] = flow.log.of(TeacherScored)
    flow.log.append(HINTS, replace(scored, teacher="who@else"))
    log = await written(flow, 1)
    read_about = ReplayWorker._read_about_answers
    kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    async def watched(worker: ReplayWorker, number: int) -> Any:
        beside = await read_about(worker, number)
        kept.append((dict(beside), beside))
        return beside

    monkeypatch.setattr(ReplayWorker, "_read_about_answers", watched)
    await replayed(log, teacher=Tutor().name)
    [(at_first, at_last)] = kept
    [[(_, packed)]] = at_first.values()
    assert packed.scored.teacher == Tutor().name
    assert packed.scored.teacher_logprobs is None
    assert isinstance(packed.teacher_logprobs, array)
    assert packed.unpacked() == scored
    assert at_last == {}
