"""Answers given again: which prompts are asked, and that each usable answer is one sample of its hint alone."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.config import JudgeSettings
from clawstream.events import (
    EVERYTHING,
    AnswerRefreshed,
    Event,
    ExchangeCompleted,
    FinishReason,
    HintFound,
    LearnsFrom,
    RefusalReason,
    SampleAssembled,
    SampleRefused,
    VerdictReached,
    VersionSpan,
    float32,
)
from clawstream.refresh.asking import NOTHING, observe
from clawstream.refresh.stage import refresh_stage
from clawstream.samples.joining import SampleRules
from clawstream.samples.joining import observe as joined
from clawstream.samples.session import MAX_UNPLACED
from clawstream.samples.session import JoiningState as State
from clawstream.stream.topics import ANSWERS, SAMPLES
from tests.examples import examples
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.flow import HOWEVER_DRAWN, Flow, Oracle, Tutor, now
from tests.sessions import Letters, Session, assistant, user
from tests.unit.refresh.refresher import HINT, FakeRefresher, of_refreshed, too_late
from tests.unit.samples.test_feedback import THUMBS, asked_twice, rated
from tests.unit.samples.test_flow import MOVES, SEEDS, conversation
from tests.unit.stream import toys


def own(log_samples: list[SampleAssembled]) -> list[SampleAssembled]:
    return [one for one in log_samples if one.refreshed_id is None]


def test_a_hint_gets_so_many_answers_of_the_same_prompt_and_each_is_a_sample_without_a_reward() -> None:
    refresher = FakeRefresher()
    log = Flow(Oracle(HINT), refresher=refresher, answers_per_hint=4).run(asked_twice(after=[(0, -1.0)]))
    first, revised, *_ = own(log.of(SampleAssembled))
    further = of_refreshed(log.of(SampleAssembled))
    assert [ask.number for ask in refresher.asked] == [1, 2, 3]
    assert len({one.sample_id for one in further}) == 3
    assert len({one.response_ids for one in further}) == 3
    assert {ask.prompt_ids for ask in refresher.asked} == {first.prompt_ids}
    for one in further:
        assert one.turn_id == first.turn_id
        assert (one.prompt_ids, one.hint, one.hinted_prompt_ids) == (
            first.prompt_ids, first.hint, first.hinted_prompt_ids,
        )  # fmt: skip
        parts = (one.reward, one.person_reward, one.environment_reward, one.heuristic_reward)
        assert (*parts, one.total_reward, one.num_feedback) == (None,) * 6
        assert one.versions == (VersionSpan(policy_version=8, num_tokens=len(one.response_ids)),)
        assert one.response_logprobs == (-0.25,) * len(one.response_ids)
    assert revised.total_reward == -1.0


def test_one_answer_a_hint_is_the_turns_own() -> None:
    refresher = FakeRefresher()
    Flow(Oracle(HINT), refresher=refresher).run(asked_twice(after=[(0, -1.0)]))
    assert refresher.asked == []


def test_two_judges_hints_score_the_same_answers() -> None:
    refresher = FakeRefresher()
    flow = Flow(Oracle(HINT), refresher=refresher, answers_per_hint=3)
    log = flow.run(asked_twice())
    [found] = log.of(HintFound)
    [verdict] = log.of(VerdictReached)
    flow.run([replace(found, judge="another"), replace(verdict, judge="another")])
    assert [ask.number for ask in refresher.asked] == [1, 2]
    assert Counter(one.refreshed_id for one in of_refreshed(log.of(SampleAssembled))) == dict.fromkeys(
        log.first_by_id(ANSWERS), 2
    )


def test_a_turn_whose_samples_come_too_late_is_answered_once_however_often_a_thumb_turns() -> None:
    refresher = FakeRefresher()
    flow = Flow(Oracle(HINT), refresher=refresher)
    log = flow.run(asked_twice(after=[(0, 1.0), (0, -1.0), (0, 1.0)]))
    _, *late = own(log.of(SampleAssembled))
    assert len(late) > 1
    flow.run([too_late(one) for one in (*late, *late)])
    [one] = of_refreshed(log.of(SampleAssembled))
    assert [ask.number for ask in refresher.asked] == [0]
    assert (one.hint, one.learned_reward) == (late[0].hint, None)
    assert (one.prompt_ids, one.hinted_prompt_ids) == (late[0].prompt_ids, late[0].hinted_prompt_ids)


def test_a_sample_of_a_session_that_is_over_is_answered_too_and_once() -> None:
    refresher = FakeRefresher()
    flow = Flow(Oracle(HINT), refresher=refresher)
    log = flow.run([*asked_twice(), Session().done()])
    first, *_ = log.of(SampleAssembled)
    flow.run([too_late(first)])
    flow.run([too_late(first)])
    assert [one.turn_id for one in of_refreshed(log.of(SampleAssembled))] == [first.turn_id]
    assert len(refresher.asked) == 1


def test_an_answer_is_sampled_as_the_turns_own_was_with_a_seed_of_its_own_that_stays() -> None:
    [first, *_] = own(Flow(Oracle(HINT)).run(asked_twice()).of(SampleAssembled))
    assert first.sampling is not None
    asks = observe(NOTHING, first, 0, policy_id="policy", answers_per_hint=3).calls
    assert [replace(ask.seeded, seed=None) for ask in asks] == [replace(first.sampling, seed=None)] * 2
    again = observe(NOTHING, first, 9, policy_id="policy", answers_per_hint=3).calls
    assert [ask.seeded.seed for ask in asks] == [ask.seeded.seed for ask in again]
    assert len({ask.seeded.seed for ask in asks}) == 2


def test_another_policys_samples_and_those_without_a_hint_are_not_answered() -> None:
    [first, *_] = own(Flow(Oracle(HINT)).run(asked_twice()).of(SampleAssembled))
    of_key = replace(first, policy_id="policy+ben")
    [ask, _] = observe(NOTHING, of_key, 0, policy_id="policy", by_key=True, answers_per_hint=3).calls
    assert ask.policy_id == "policy+ben"
    for one in (replace(first, policy_id="other"), of_key, replace(first, hint=None)):
        assert not observe(NOTHING, one, 0, policy_id="policy", answers_per_hint=3).calls
    theirs = replace(too_late(first), policy_id="other")
    assert not observe(NOTHING, theirs, 0, policy_id="policy", answers_per_hint=3).calls


@pytest.mark.parametrize(("age_ms", "num_asked"), [(51, 0), (50, 1)])
async def test_what_is_older_than_feedback_is_heard_for_is_given_up_unasked_and_that_is_on_the_log_once(
    age_ms: int, num_asked: int
) -> None:
    [first, *_] = own(Flow(Oracle(HINT)).run(asked_twice()).of(SampleAssembled))
    refresher = FakeRefresher()
    log = MemoryLog(MemoryBroker(partitions=1))
    await log.append([first, too_late(first)])
    told = [record.timestamp_ms for record in await toys.read(log, SAMPLES)]
    stage = refresh_stage(refresher, "policy", answers_per_hint=2, heard_ms=50, now_ms=lambda: told[0] + age_ms)
    async with toys.running(stage, log):
        await toys.settled(log, "refresh")
    said = [one.event for one in await toys.read(log, ANSWERS) if isinstance(one.event, AnswerRefreshed)]
    assert sorted((one.number, one.message is None) for one in said) == [(0, True), (1, num_asked == 0)]
    assert len(refresher.asked) == num_asked
    assert all("too old" in (one.error or "") for one in said if one.message is None)


def test_how_old_an_ask_is_is_counted_from_its_sample_on_whenever_it_is_asked() -> None:
    [first, *_] = own(Flow(Oracle(HINT)).run(asked_twice()).of(SampleAssembled))
    late = replace(too_late(first), asked_at_ms=5)
    asks = [
        *observe(NOTHING, late, 1000, policy_id="policy", answers_per_hint=1).calls,
        *observe(NOTHING, first, 7, policy_id="policy", answers_per_hint=2).calls,
    ]
    assert [ask.at_ms for ask in asks] == [5, 7]


def test_answers_to_prompts_that_are_not_there_are_bounded_and_the_oldest_is_forgotten() -> None:
    [first, *_] = own(Flow(Oracle(HINT)).run(asked_twice()).of(SampleAssembled))
    [ask] = observe(NOTHING, first, 0, policy_id="policy", answers_per_hint=2).calls
    state: State | None = None
    given_: Event
    for number in range(MAX_UNPLACED + 3):
        [given_] = now(FakeRefresher().answer(replace(ask, turn_id=f"nowhere-{number}")))
        state, _, _ = joined(state, given_, SampleRules(Letters()))
    assert state is not None
    assert list(state.refreshed) == [f"nowhere-{number}" for number in range(3, MAX_UNPLACED + 3)]


def test_an_answer_that_is_cut_off_is_refused_for_that_and_its_turn_is_not() -> None:
    log = Flow(Oracle(HINT), refresher=FakeRefresher(bad=1), answers_per_hint=3).run(asked_twice())
    given_ = log.of(AnswerRefreshed)
    [turn] = own(log.of(SampleAssembled))
    assert [one.finish_reason for one in given_] == [FinishReason.LENGTH] * 2
    assert of_refreshed(log.of(SampleAssembled)) == []
    assert [(one.turn_id, one.judge, one.refreshed_id, one.reason) for one in log.of(SampleRefused)] == [
        (turn.turn_id, turn.judge, one.event_id, RefusalReason.TRUNCATED) for one in given_
    ]


def test_an_answer_that_the_rules_do_not_let_be_trained_on_any_more_is_refused_for_that_once() -> None:
    cold = [
        replace(event, sampling=replace(event.sampling, top_k=1)) if isinstance(event, ExchangeCompleted) else event
        for event in asked_twice()
    ]
    before = Flow(Oracle(HINT), refresher=FakeRefresher(), learns=HOWEVER_DRAWN, answers_per_hint=2).run(cold)
    [given_] = before.of(AnswerRefreshed)
    flow = Flow(Oracle(HINT))
    flow.run([*cold, given_, given_])
    refused = [one.reason for one in flow.log.of(SampleRefused) if one.refreshed_id == given_.event_id]
    assert refused == [RefusalReason.OFF_DISTRIBUTION]


@pytest.mark.parametrize(("learns", "num"), [(EVERYTHING, 0), (HOWEVER_DRAWN, 1)])
@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"top_k": 1}])
def test_greedy_answers_are_answered_again_only_where_their_hints_count_and_once(
    greedy: dict[str, Any], learns: LearnsFrom, num: int
) -> None:
    cold = [
        replace(event, sampling=replace(event.sampling, **greedy)) if isinstance(event, ExchangeCompleted) else event
        for event in asked_twice()
    ]
    refresher = FakeRefresher()
    log = Flow(Oracle(HINT), refresher=refresher, learns=learns, answers_per_hint=3).run(cold)
    assert len(refresher.asked) == len(of_refreshed(log.of(SampleAssembled))) == num


def test_where_an_engine_is_the_teacher_it_scores_each_answer_given_again() -> None:
    tutor = Tutor()
    log = Flow(Oracle(HINT), teacher=tutor, refresher=FakeRefresher(), answers_per_hint=3).run(asked_twice())
    further = of_refreshed(log.of(SampleAssembled))
    assert len(further) == 2
    assert {asked.response_ids for asked in tutor.asked} >= {one.response_ids for one in further}
    for one in further:
        assert one.hinted_prompt_ids is not None
        assert one.teacher_logprobs == float32(-0.001 * (len(one.hinted_prompt_ids) + id_) for id_ in one.response_ids)
        assert one.student_version == 9


@examples(0.6)
@given(MOVES, THUMBS, SEEDS, st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_any_interleaving_and_any_restart_gives_the_same_answers_and_one_sample_of_each_that_is_of_use(
    moves: list[str],
    thumbs: list[tuple[float, int, float | None, object]],
    seed: int,
    answers: int,
    bad: int,
    taught: bool,
) -> None:
    events = rated(conversation(["ask", *moves]), thumbs)  # type: ignore[arg-type]

    def run_through(rng: random.Random | None, restarts: float = 0.0) -> Flow:
        flow = Flow(refresher=FakeRefresher(bad + 1), answers_per_hint=answers, teacher=Tutor() if taught else None)
        flow.run(events, rng, restarts=restarts)
        # Which of a turn's revisions there are depends on what came between; the first and the last are always there.
        hinted = {one.turn_id: one for one in own(flow.log.of(SampleAssembled)) if one.hint}
        flow.run([too_late(one) for one in hinted.values()], rng, restarts=restarts)
        return flow

    calm, wild = run_through(None), run_through(random.Random(seed), 0.15)
    found = {one.event_id: one for one in wild.log.of(AnswerRefreshed)}
    assert found == {one.event_id: one for one in calm.log.of(AnswerRefreshed)}
    samples = of_refreshed(wild.log.first_by_id(SAMPLES).values())
    assert {one.sample_id: one for one in samples} == {
        one.sample_id: one for one in of_refreshed(calm.log.first_by_id(SAMPLES).values())
    }
    assert Counter(one.refreshed_id for one in samples) == Counter(
        name for name, one in found.items() if one.finish_reason is FinishReason.STOP
    )
    assert {one.turn_id for one in samples} <= {hint.turn_id for hint in wild.log.of(HintFound)}
    refused = [one for one in wild.log.first_by_id(SAMPLES).values() if isinstance(one, SampleRefused)]
    assert Counter(one.refreshed_id for one in refused if one.refreshed_id) == Counter(
        name for name, one in found.items() if one.finish_reason is FinishReason.LENGTH
    )


@examples(0.4)
@given(MOVES, SEEDS)
def test_answers_that_are_on_the_log_are_used_whatever_is_read_first_and_not_asked_for_again(
    moves: list[str], seed: int
) -> None:
    events = conversation(["ask", *moves, "ask"])
    before = Flow(refresher=FakeRefresher(), answers_per_hint=3)
    late = [too_late(one) for one in own(before.run(events).of(SampleAssembled)) if one.hint]
    expected = of_refreshed(before.run(late).first_by_id(SAMPLES).values())
    given_ = before.log.of(AnswerRefreshed)

    flow = Flow(refresher=FakeRefresher(), answers_per_hint=3)
    flow.run([*late, *given_, *events], random.Random(seed), restarts=0.1)
    found = of_refreshed(flow.log.first_by_id(SAMPLES).values())
    assert {one.sample_id: one for one in found} == {one.sample_id: one for one in expected}

    refresher = FakeRefresher()
    flow = Flow(refresher=refresher, answers_per_hint=3)
    flow.run(given_)
    flow.run([*events, *late])
    assert refresher.asked == []
    found = of_refreshed(flow.log.first_by_id(SAMPLES).values())
    assert {one.sample_id for one in found} == {one.sample_id for one in expected}


def test_a_hint_that_comes_after_the_answer_given_again_scores_it() -> None:
    session = Session()
    first = session.ask([user("a")], "b")
    session.ask([user("a"), assistant("b"), user("no headings")], "c")
    [sample, *_] = own(Flow(Oracle(HINT)).run(session.written).of(SampleAssembled))
    assert sample.turn_id == first.exchange_id
    answered: Event
    [answered] = now(
        FakeRefresher().answer(observe(NOTHING, sample, 0, policy_id="policy", answers_per_hint=2).calls[0])
    )
    flow = Flow(Oracle(HINT), JudgeSettings(votes=1))
    flow.run([session.written[0], answered, *session.written[1:]])
    [one] = of_refreshed(flow.log.of(SampleAssembled))
    assert (one.refreshed_id, one.hint) == (answered.event_id, "Leave out the headings.")
