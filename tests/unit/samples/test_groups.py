"""An attempt's steps: each has a sample, whatever judges say: its reward may be the attempt's outcome alone."""

import random

import pytest
from hypothesis import given

from clawstream.events import NOBODY, RefusalReason, SampleAssembled, SampleRefused
from tests.flow import Flow, Oracle
from tests.unit.groups.attempts import attempt
from tests.unit.samples.test_flow import SEEDS, UNDECIDED


def test_a_step_of_which_judges_say_nothing_has_a_sample_without_a_reward() -> None:
    log = Flow(Oracle(UNDECIDED), grouped=True).run(attempt(None, None).written)
    [sample] = log.of(SampleAssembled)
    assert (sample.reward, sample.total_reward, sample.hint) == (None, None, None)
    assert (sample.group_id, sample.step_index) == ("task", 0)
    assert [refused.turn_id for refused in log.of(SampleRefused)] == [None]  # the floor's look at the session


def test_a_turn_of_no_group_of_which_judges_say_nothing_has_none() -> None:
    assert (
        Flow(Oracle(UNDECIDED), grouped=True).run(attempt(None, None, group_id=None).written).of(SampleAssembled) == []
    )


@pytest.mark.parametrize("judged", [True, False])
def test_where_no_trainer_takes_groups_such_a_step_has_none(judged: bool) -> None:
    log = Flow(Oracle(UNDECIDED), judged=judged).run(attempt(None, None).written)
    assert log.of(SampleAssembled) == []
    assert (RefusalReason.NO_SIGNAL in {refused.reason for refused in log.of(SampleRefused)}) is judged


@pytest.mark.parametrize(("said", "indices"), [((None, None, None), [0, 1]), ((7, None, 9), [7, 1])])
def test_a_step_s_index_is_what_the_client_said_or_its_number_in_the_session(
    said: tuple[int | None, ...], indices: list[int]
) -> None:
    log = Flow(Oracle(UNDECIDED), grouped=True).run(attempt(*said).written)
    assert [sample.step_index for sample in log.of(SampleAssembled)] == indices


@given(SEEDS)
def test_where_nobody_judges_each_step_that_was_answered_has_a_sample_in_any_order(seed: int) -> None:
    session = attempt(None, None, None, outcome=1.0)
    log = Flow(judged=False, grouped=True).run(session.written, random.Random(seed), restarts=0.2)
    samples = log.of(SampleAssembled)
    assert {sample.judge for sample in samples} == {NOBODY}
    assert {sample.turn_id: sample.environment_reward for sample in samples} == {
        exchange.exchange_id: outcome  # type: ignore[attr-defined]
        for exchange, outcome in zip(session.written, (None, None, 1.0), strict=False)
    }
