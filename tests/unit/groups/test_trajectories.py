"""When an attempt has ended, through all stages in memory: in any order, with restarts, with feedback that is late."""

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, zip_longest

from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import (
    Event,
    ExchangeCompleted,
    FeedbackGiven,
    FeedbackSource,
    GroupSettled,
    GroupWaited,
    Question,
    RefusalReason,
    SampleAssembled,
    SampleRefused,
    StepDropReason,
    TrajectoryEnded,
    TrajectoryLate,
    TurnPaired,
    TurnsSettled,
    TurnType,
)
from clawstream.groups.trajectories import TrajectoryState, observe
from clawstream.stream import topics
from clawstream.stream.topics import TURNS
from tests.examples import examples
from tests.flow import Flow, Oracle
from tests.sessions import Session, assistant, user
from tests.unit.groups.attempts import attempt
from tests.unit.samples.test_flow import GOOD, SEEDS, UNDECIDED

MIXED = {Question.SCORE: ["\\boxed{1}", "\\boxed{-1}"], Question.HINT: ["\\boxed{-1}"]}


def mingled(*sessions: Session) -> list[Event]:
    """The sessions' events, in turn."""
    rounds: Iterable[tuple[Event | None, ...]] = zip_longest(*(session.written for session in sessions))
    return [event for event in chain.from_iterable(rounds) if event is not None]


@examples(0.6)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=3), SEEDS)
def test_any_interleaving_and_any_restart_settles_the_same_steps_by_the_same_rewards(
    lengths: list[int], seed: int
) -> None:
    sessions = [
        attempt(*[None] * length, session_id=f"s{n}", size=len(lengths), outcome=1.0 - n)
        for n, length in enumerate(lengths)
    ]
    calm = Flow(Oracle(MIXED), grouped=True).run(mingled(*sessions))
    wild = Flow(Oracle(MIXED), grouped=True).run(mingled(*sessions), random.Random(seed), restarts=0.15)
    [one], [other] = calm.of(GroupSettled), wild.of(GroupSettled)
    assert one.complete
    steps = [
        {step.turn_id: (step.step_index, step.reward, step.advantage) for step in found.advantages}
        for found in (one, other)
    ]
    assert steps[0] == steps[1]
    dropped = [{step.turn_id: step.reason for step in found.dropped} for found in (one, other)]
    assert dropped[0] == dropped[1]
    assert len(steps[0]) + len(dropped[0]) == sum(lengths)


def test_an_attempt_that_is_done_says_what_is_known_of_each_step() -> None:
    log = Flow(Oracle(GOOD), grouped=True).run(attempt(None, None, outcome=-1.0).written)
    *_, ended = log.of(TrajectoryEnded)
    assert (ended.group_size, ended.outcome) == (2, -1.0)
    assert [(step.step_index, step.judge_reward, step.sample_id is None) for step in ended.steps] == [
        (0, 1, False),
        (1, None, False),
    ]
    assert ended.trajectory_id == ended.steps[0].turn_id


def test_an_attempt_that_goes_on_has_not_ended_nor_has_a_session_of_no_group() -> None:
    assert Flow(grouped=True).run(attempt(None, None).written[:-1]).of(TrajectoryEnded) == []
    assert Flow(grouped=True).run(attempt(None, None, group_id=None, outcome=1.0).written).of(TrajectoryEnded) == []


def test_a_session_that_is_used_again_is_two_attempts() -> None:
    session = attempt(None, outcome=1.0)
    session.ask([user("start over")], "again")
    session.done()
    log = Flow(judged=False, grouped=True).run(session.written)
    assert len({ended.trajectory_id for ended in log.of(TrajectoryEnded)}) == 2
    assert all(len(ended.steps) == 1 for ended in log.of(TrajectoryEnded))


def test_side_turns_are_no_steps() -> None:
    session, messages = Session(group_id="task"), [user("begin")]
    session.ask(messages, "the answer")
    session.ask([user("title?")], "a title", turn_type=TurnType.SIDE)
    session.ask([*messages, assistant("the answer"), user("result")], "the end")
    session.done()
    *_, ended = Flow(Oracle(GOOD), grouped=True).run(session.written).of(TrajectoryEnded)
    assert [step.step_index for step in ended.steps] == [0, 1]


def test_a_request_that_was_asked_again_is_the_same_step() -> None:
    session, messages = Session(group_id="task"), [user("begin")]
    session.ask(messages, "the answer")
    session.ask(messages, "another")
    session.ask([*messages, assistant("another"), user("result")], "the end")
    session.done()
    *_, ended = Flow(Oracle(GOOD), grouped=True).run(session.written).of(TrajectoryEnded)
    assert [step.step_index for step in ended.steps] == [0, 0, 1]


def test_an_answer_that_nobody_saw_delivered_or_spoke_of_is_dropped_without_a_sample() -> None:
    waited = GroupWaited(group_id="task", wait_s=60.0)
    log = Flow(Oracle(GOOD), grouped=True).run([*attempt(None, None).written, waited])
    [settled] = log.of(GroupSettled)
    assert [step.reason for step in settled.dropped] == [StepDropReason.NO_SAMPLE]
    assert [step.reward for step in settled.advantages] == [1.0]


def test_an_outcome_that_comes_after_the_end_completes_the_group() -> None:
    first = attempt(None, None, session_id="a", outcome=1.0)
    second = attempt(None, None, session_id="b")
    flow = Flow(Oracle(UNDECIDED), grouped=True)
    assert flow.run(mingled(first, second)).of(GroupSettled) == []
    said = second.rate(second.written[1].exchange_id, -1.0, FeedbackSource.ENVIRONMENT)  # type: ignore[attr-defined]
    [settled] = flow.run([said]).of(GroupSettled)
    assert sorted(step.advantage for step in settled.advantages) == [-1.0, -1.0, 1.0, 1.0]


def test_feedback_after_the_group_was_settled_is_late_and_trains_nothing() -> None:
    sessions = [attempt(None, None, session_id=name, outcome=score) for name, score in (("a", 1.0), ("b", -1.0))]
    flow = Flow(Oracle(GOOD), grouped=True)
    [settled] = flow.run(mingled(*sessions)).of(GroupSettled)
    before = len(flow.log.topics[topics.GROUPS])
    [turn_id] = {step.turn_id for step in settled.advantages} & {sessions[0].written[0].exchange_id}  # type: ignore[attr-defined]
    said = sessions[0].rate(turn_id, 1.0)
    log = flow.run([said])
    [late] = log.of(TrajectoryLate)
    assert [step.turn_id for step in late.dropped] == [turn_id]
    assert log.of(GroupSettled) == [settled]
    assert len(log.topics[topics.GROUPS]) == before + 2


def test_what_is_read_again_is_said_once_and_of_a_turn_s_samples_the_newest_counts_in_any_order() -> None:
    log = Flow(Oracle(GOOD), grouped=True).run(attempt(None, None, outcome=1.0).written)
    [first, second] = [sample for sample in log.of(SampleAssembled) if sample.num_feedback is None] + [
        sample for sample in log.of(SampleAssembled) if sample.num_feedback is not None
    ]
    revised = replace(first, num_feedback=1, person_reward=-1.0, reward=1)
    facts = [*log.of(ExchangeCompleted), *log.of(TurnPaired), *log.of(TurnsSettled), *log.of(FeedbackGiven), second]
    for samples in ([first, revised], [revised, first], [revised, revised, first]):
        attempts, said = None, list[Event]()
        for at_ms, event in enumerate([*facts, *samples, *facts]):
            attempts, events, _ = observe(attempts, event, at_ms)
            said += events
        assert isinstance(said[-1], TrajectoryEnded)
        assert [step.sample_id for step in said[-1].steps] == [revised.sample_id, second.sample_id]
        assert len({event.event_id for event in said}) == len(said)


def test_an_attempt_ended_when_its_session_was_first_said_to_be_settled_whatever_is_judged_or_read_later() -> None:
    log = Flow(Oracle(GOOD), grouped=True).run(attempt(None, None, outcome=1.0).written)
    [at_ms] = [record.timestamp_ms for record in log.topics[TURNS] if isinstance(record.event, TurnsSettled)]
    assert {ended.ended_at_ms for ended in log.of(TrajectoryEnded)} == {at_ms}
    attempts = None
    records = sorted((record for topic in log.topics.values() for record in topic), key=lambda one: one.timestamp_ms)
    for record in [*records, *(record._replace(timestamp_ms=10**6) for record in records)]:
        attempts, events, _ = observe(attempts, record.event, record.timestamp_ms)
        assert {one.ended_at_ms for one in events if isinstance(one, TrajectoryEnded)} <= {at_ms}


def test_an_attempt_ended_when_its_session_was_idle_also_where_the_client_says_later_that_it_is_done() -> None:
    log = Flow(Oracle(GOOD), grouped=True).run(attempt(None, None, outcome=1.0).written)
    [done] = log.of(TurnsSettled)
    said_before = [*log.of(ExchangeCompleted), *log.of(TurnPaired)]
    attempts, said = None, []
    for at_ms, event in enumerate([*said_before, replace(done, done=False), done, *log.of(SampleAssembled)]):
        attempts, events, _ = observe(attempts, event, at_ms)
        said += [one for one in events if isinstance(one, TrajectoryEnded)]
    assert {ended.ended_at_ms for ended in said} == {len(said_before)}


def test_what_differs_in_anything_has_another_id() -> None:
    """As facts come in other orders, one attempt may be said with the same samples at other revisions."""
    log = Flow(Oracle(GOOD), grouped=True).run(attempt(None, None, outcome=1.0).written)
    ended = log.of(TrajectoryEnded)[-1]
    assert replace(ended, revision=ended.revision + 1).event_id != ended.event_id


def test_an_answer_given_again_that_is_refused_says_nothing_of_its_turns_step() -> None:
    refused = SampleRefused(
        session_id="s", turn_id="t", judge="j", prompt_version="1", revision=0, reason=RefusalReason.TRUNCATED,
        refreshed_id="a",
    )  # fmt: skip
    assert observe(None, refused, 0).state == TrajectoryState()
    assert observe(None, replace(refused, refreshed_id=None), 0).state != TrajectoryState()
