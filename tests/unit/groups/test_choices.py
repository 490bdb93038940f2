"""The answers of one request as a group: each is an attempt by itself, and has its own outcome."""

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import (
    FeedbackSource,
    GroupSettled,
    GroupWaited,
    TrajectoryEnded,
    TurnOrphaned,
    TurnPaired,
)
from tests.examples import examples
from tests.flow import Flow, Oracle
from tests.sessions import Session, assistant, user
from tests.unit.samples.test_flow import GOOD, SEEDS

OUTCOMES = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=2, max_size=8)


def chosen(outcomes: Sequence[float | None], *, goes_on_with: int | None = None) -> tuple[Session, list[str]]:
    """A session with a request of so many answers, in the words of the environment; it may go on with one of them."""
    session = Session()
    answers = [f"answer {number}" for number in range(len(outcomes))]
    turns = [one.exchange_id for one in session.choose([user("begin")], answers)]
    for turn_id, outcome in zip(turns, outcomes, strict=True):
        if outcome is not None:
            session.rate(turn_id, outcome, FeedbackSource.ENVIRONMENT)
    if goes_on_with is not None:
        session.ask([user("begin"), assistant(answers[goes_on_with]), user("good")], "the end")
    session.done()
    return session, turns


@examples(0.4)
@given(OUTCOMES, SEEDS, st.booleans())
def test_any_interleaving_and_any_restart_weighs_each_answer_s_outcome_against_the_others(
    outcomes: list[float], seed: int, goes_on: bool
) -> None:
    session, turns = chosen(outcomes, goes_on_with=0 if goes_on else None)
    log = Flow(Oracle(GOOD), judged=False, grouped=True).run(session.written, random.Random(seed), restarts=0.15)
    [settled] = log.of(GroupSettled)
    assert (settled.group_id, settled.complete) == (turns[0], True)
    rewards = {step.turn_id: step.reward for step in settled.advantages}
    if len(set(outcomes)) == 1:
        assert (rewards, {step.turn_id for step in settled.dropped}) == ({}, set(turns))
    else:
        assert rewards == dict(zip(turns, outcomes, strict=True))
        assert abs(sum(step.advantage for step in settled.advantages)) < 1e-6
        assert {step.step_index for step in settled.advantages} == {0}


def test_the_answer_that_was_echoed_is_judged_and_the_others_are_weighed_by_their_outcomes() -> None:
    session, turns = chosen([1.0, -1.0, 0.0], goes_on_with=1)
    log = Flow(Oracle(GOOD), grouped=True).run(session.written)
    assert [event.turn_id for event in log.of(TurnPaired)] == [turns[1]]
    assert {event.turn_id for event in log.of(TurnOrphaned)} == {turns[0], turns[2]}
    [settled] = log.of(GroupSettled)
    assert {step.turn_id: step.reward for step in settled.advantages} == {turns[0]: 1.0, turns[1]: 0.0, turns[2]: 0.0}


def test_answers_without_any_outcome_are_settled_once_the_wait_is_over_and_teach_nothing() -> None:
    session, turns = chosen([None, None])
    waited = GroupWaited(group_id=turns[0], wait_s=60.0)
    log = Flow(Oracle(GOOD), grouped=True).run([*session.written, waited])
    [settled] = log.of(GroupSettled)
    assert (settled.complete, settled.advantages) == (False, ())
    assert {ended.trajectory_id: ended.group_size for ended in log.of(TrajectoryEnded)} == dict.fromkeys(turns, 2)
