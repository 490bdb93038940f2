"""An answer that ran into the policy's own limit is -1, judged or not; a person's score wins over that."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given

from clawstream.conversation.floor import mask
from clawstream.conversation.messages import LOOP_TOKENS
from clawstream.events import (
    EVERYTHING,
    NOBODY,
    AnswerRefreshed,
    Event,
    ExchangeCompleted,
    FinishReason,
    LearnsFrom,
    RefusalReason,
    RewardWeights,
    SampleAssembled,
    SampleRefused,
    VoteCast,
)
from tests.examples import examples
from tests.flow import HOWEVER_DRAWN, Flow, Oracle
from tests.sessions import Session, assistant, user
from tests.unit.refresh.refresher import HINT, FakeRefresher, of_refreshed
from tests.unit.samples.test_feedback import BAD, newest
from tests.unit.samples.test_flow import GOOD, SEEDS, UNDECIDED


def ran_on(event: Event, *, by_client: bool = False) -> Event:
    if not isinstance(event, ExchangeCompleted) or event.finish_reason is not FinishReason.LENGTH:
        return event
    return replace(event, sampling=replace(event.sampling, limit_by_client=by_client))


def told(
    *, goes_on: bool = True, scores: Sequence[float] = (), by_client: bool = False, text: str = "and so on and"
) -> list[Event]:
    """A session whose first answer does not end; with `goes_on` a next state and another answer follow it."""
    session = Session()
    first = session.ask([user("2+2?")], text, finish_reason=FinishReason.LENGTH)
    if goes_on:
        session.ask([user("2+2?"), assistant(text), user("thanks")], "welcome")
    for score in scores:
        session.rate(first.exchange_id, score)
    session.done()
    return [ran_on(event, by_client=by_client) for event in session.written]


@pytest.mark.parametrize("judge", [Oracle(GOOD), Oracle(UNDECIDED), Oracle(BAD)])
def test_it_is_bad_whatever_a_judge_said(judge: Oracle) -> None:
    [sample] = Flow(judge).run(told()).of(SampleAssembled)
    assert (sample.judge, sample.reward, sample.total_reward, sample.cut) == (judge.name, -1, -1.0, True)


@pytest.mark.parametrize("goes_on", [True, False])
def test_it_is_bad_without_a_judge_too_and_where_no_next_state_comes(goes_on: bool) -> None:
    for flow in (Flow(judged=False), *(() if goes_on else (Flow(Oracle(GOOD)),))):
        [sample] = flow.run(told(goes_on=goes_on)).of(SampleAssembled)
        assert (sample.judge, sample.reward, sample.total_reward, sample.cut) == (NOBODY, -1, -1.0, True)
        assert not flow.judge.asked


@pytest.mark.parametrize("judged", [True, False])
def test_where_the_client_asked_for_so_few_tokens_it_is_refused(judged: bool) -> None:
    log = Flow(Oracle(GOOD), judged=judged).run(told(by_client=True, scores=[1.0]))
    assert log.of(SampleAssembled) == []
    assert {one.reason for one in log.of(SampleRefused)} == {RefusalReason.TRUNCATED}


@pytest.mark.parametrize("judged", [True, False])
@pytest.mark.parametrize("score", [1.0, 0.0])
def test_people_win(judged: bool, score: float) -> None:
    log = Flow(Oracle(GOOD), judged=judged).run(told(scores=[score]))
    [last] = newest(log).values()
    assert (last.reward, last.person_reward, last.total_reward) == (-1, score, score or None)


def test_where_judges_do_not_count_it_is_recorded_alone() -> None:
    [sample] = Flow(judged=False, weights=RewardWeights(judge=0.0)).run(told()).of(SampleAssembled)
    assert (sample.reward, sample.total_reward) == (-1, None)


@examples(10)
@given(SEEDS)
def test_in_any_order_and_after_any_restart_it_comes_to_the_same_samples(seed: int) -> None:
    for judged in (True, False):
        calm = Flow(Oracle(GOOD), judged=judged).run(told(scores=[-0.5]))
        flow = Flow(Oracle(GOOD), judged=judged)
        assert newest(flow.run(told(scores=[-0.5]), random.Random(seed), restarts=0.1)) == newest(calm)


@pytest.mark.parametrize("text", ["", "ab" * LOOP_TOKENS])
def test_thinking_alone_and_a_loop_are_trained_on_where_they_were_cut(text: str) -> None:
    answer = Session().ask([user("hm")], text, finish_reason=FinishReason.LENGTH)
    answer = replace(answer, output_ids=(*answer.output_ids, 7), output_logprobs=(*answer.output_logprobs, -1.0))
    cut = ran_on(answer)
    assert isinstance(cut, ExchangeCompleted)
    assert mask(cut) == (1,) * (len(text) + 1)
    assert mask(answer) is (RefusalReason.TRUNCATED if text else RefusalReason.EMPTY_ANSWER)
    assert mask(replace(cut, output_ids=(), output_logprobs=())) is RefusalReason.EMPTY_ANSWER


@pytest.mark.parametrize(("learns", "reasons"), [(EVERYTHING, [RefusalReason.OFF_DISTRIBUTION]), (HOWEVER_DRAWN, [])])
def test_one_that_was_not_drawn_by_the_policy_s_probabilities_is_no_reward(
    learns: LearnsFrom, reasons: list[RefusalReason]
) -> None:
    events = [
        replace(event, sampling=replace(event.sampling, top_p=0.5)) if isinstance(event, ExchangeCompleted) else event
        for event in told()
    ]
    log = Flow(Oracle(HINT), learns=learns).run(events)
    assert [one.reason for one in log.of(SampleRefused)] == reasons
    assert [(one.reward, one.cut) for one in log.of(SampleAssembled)] == [(None, False)] * (not reasons)


def test_of_an_answer_given_again_that_is_cut_nothing_is_learned() -> None:
    log = Flow(Oracle(HINT), refresher=FakeRefresher(bad=1), answers_per_hint=3).run(told())
    given_ = log.of(AnswerRefreshed)
    assert [one.sampling.limit_by_client for one in given_] == [False] * 2
    assert of_refreshed(log.of(SampleAssembled)) == []
    assert [one.reason for one in log.of(SampleRefused)] == [RefusalReason.TRUNCATED] * 2


def test_a_session_with_one_has_a_sample_and_needs_no_second_look() -> None:
    log = Flow(Oracle(UNDECIDED)).run(told())
    assert [vote for vote in log.of(VoteCast) if vote.revision > 0] == []
    assert len(log.of(SampleAssembled)) == 1
