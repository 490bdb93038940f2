"""Samples whose hints an engine weighs: each waits for its scores, holds those of its own tokens, or does without."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import (
    Event,
    ExchangeCompleted,
    FeedbackSource,
    HintFound,
    Question,
    RefusalReason,
    SampleAssembled,
    SampleRefused,
    Sampling,
    TeacherScored,
    TeacherStatus,
    float32,
    sha256_of,
)
from clawstream.samples.hinted import Scoring
from clawstream.samples.joining import SampleRules, TeacherRule, observe
from clawstream.samples.session import JoiningState as State
from clawstream.stream.topics import EXCHANGES, FEEDBACK, HINTS, SAMPLES, TURNS, VERDICTS
from tests.examples import examples
from tests.flow import HOWEVER_DRAWN, Flow, Log, Oracle, Tutor
from tests.sessions import Letters, Session, assistant, user
from tests.unit.samples.test_feedback import THUMBS, rated
from tests.unit.samples.test_flow import MOVES, SEEDS, conversation, nothing_left

READ = (EXCHANGES, TURNS, VERDICTS, HINTS, FEEDBACK)
HINTED = "\\boxed{1} [HINT_START]Leave out the headings.[HINT_END]"
Thumbs = list[tuple[float, int, float | None, FeedbackSource]]


def judge(score: int) -> Oracle:
    """Always a hint, and this score."""
    return Oracle({Question.SCORE: [f"\\boxed{{{score}}}"], Question.HINT: [HINTED]})


def one_turn() -> Session:
    session = Session()
    session.ask([user("a")], "# four")
    session.ask([user("a"), assistant("# four"), user("no headings")], "sorry")
    return session


@examples(1)
@given(MOVES, MOVES, THUMBS, st.integers(1, 12), SEEDS)
def test_any_interleaving_and_any_restart_gives_the_same_scores_and_samples(
    ann: list[str], ben: list[str], thumbs: Thumbs, too_long: int, seed: int
) -> None:
    events = [*rated(conversation(ann, "ann"), thumbs), *conversation(ben, "ben")]
    calm = Flow(teacher=Tutor(too_long=too_long)).run(events)
    wild = Flow(teacher=Tutor(too_long=too_long)).run(events, random.Random(seed), restarts=0.15)
    assert scores(wild) == scores(calm)
    assert newest(wild) == newest(calm)


def scores(log: Log) -> dict[str, Event]:
    return {id_: event for id_, event in log.first_by_id(HINTS).items() if isinstance(event, TeacherScored)}


def newest(log: Log) -> dict[tuple[str, int], Event]:
    """The sample of each look that knows most, or what was said in its place."""
    found: dict[tuple[Any, ...], Any] = {}
    for event in log.first_by_id(SAMPLES).values():
        assert isinstance(event, SampleAssembled | SampleRefused)
        key = (event.session_id, event.turn_id, event.judge, event.revision)
        heard = (event.num_feedback or 0) if isinstance(event, SampleAssembled) else -1
        if heard >= found.get(key, (-1, None))[0]:
            found[key] = (heard, event)
    return {key: event for key, (_, event) in found.items()}


@given(MOVES, SEEDS)
def test_a_sample_with_a_hint_holds_the_scores_of_its_own_tokens(moves: list[str], seed: int) -> None:
    tutor = Tutor()
    log = Flow(teacher=tutor).run(conversation(["ask", *moves, "ask"]), random.Random(seed), restarts=0.1)
    found = {scored.scored_sha256: scored for scored in log.of(TeacherScored)}
    for sample in log.of(SampleAssembled):
        if sample.hinted_prompt_ids is None:
            assert (sample.teacher, sample.teacher_logprobs, sample.student_version) == (None, None, None)
            continue
        scored = found[sha256_of(sample.hinted_prompt_ids, sample.prompt_ids, sample.response_ids)]
        assert sample.teacher == tutor.name
        assert sample.teacher_logprobs == scored.teacher_logprobs
        assert sample.student_logprobs == scored.student_logprobs
        expected = [-0.001 * (len(sample.hinted_prompt_ids) + token) for token in sample.response_ids]
        assert sample.teacher_logprobs == float32(expected)
        assert sample.student_version == 4
    assert len(log.of(HintFound)) == len(found)


@given(MOVES, THUMBS)
def test_a_teacher_is_asked_once_about_each_hint_however_often_feedback_comes(moves: list[str], thumbs: Thumbs) -> None:
    tutor = Tutor()
    log = Flow(judge(1), teacher=tutor).run(rated(conversation(moves), thumbs))
    assert len(tutor.asked) == len(log.of(HintFound))


def test_feedback_that_comes_while_a_teacher_is_asked_asks_the_same_again_as_nobody_may_be_asking() -> None:
    session = one_turn()
    events = [record.event for topic in READ for record in Flow(judge(-1)).run(session.written).topics[topic]]
    answer = session.written[0]
    assert isinstance(answer, ExchangeCompleted)
    thumbs = [session.rate(answer.exchange_id, score) for score in (1.0, -1.0)]
    state: State | None = None
    asked: list[Scoring] = []
    for event in (*events, *thumbs):
        state, made, calls = observe(state, event, SampleRules(Letters(), asks=TeacherRule("tutor@test")))
        asked += calls
        assert made == []
    assert len(asked) == 3
    assert len({scoring.id for scoring in asked}) == 1


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("before", [None, Tutor()])
def test_feedback_makes_a_sample_also_where_another_engine_teaches_since_a_restart(
    before: Tutor | None, done: bool
) -> None:
    session = one_turn()
    if done:
        session.done()
    flow = Flow(judge(-1), teacher=before)
    old = flow.run(session.written).of(SampleAssembled)
    flow.teach(Tutor("other@test"))
    answer = session.written[0]
    assert isinstance(answer, ExchangeCompleted)
    new = flow.run([session.rate(answer.exchange_id, 1.0)]).of(SampleAssembled)[len(old) :]
    assert [(sample.teacher, sample.num_feedback) for sample in new] == [("other@test", 1)]


def test_a_done_session_whose_hint_waits_for_its_score_is_put_away_and_has_its_sample_when_that_comes() -> None:
    session = one_turn()
    session.done()
    log = Flow(judge(-1), teacher=Tutor()).run(session.written)
    [scored], [sample] = log.of(TeacherScored), log.of(SampleAssembled)
    state: State | None = None
    rules = SampleRules(Letters(), asks=TeacherRule("tutor@test"))
    for record in (record for topic in READ for record in log.topics[topic]):
        if not isinstance(record.event, TeacherScored):
            state = observe(state, record.event, rules).state
    assert state is not None
    assert (dict(state.requests), len(state.past)) == ({}, 1)
    after = observe(state, scored, rules)
    assert (after.events, after.calls) == ([sample], [])


@given(MOVES, SEEDS)
def test_a_life_that_is_over_takes_its_scores_with_it(moves: list[str], seed: int) -> None:
    flow = Flow(teacher=Tutor())
    flow.run(conversation(["ask", *moves, "done", "ask", "ask", "ask"]), random.Random(seed))
    state = next(state for state in flow.states() if isinstance(state, State))
    assert not state.scores.keys() & {turn_id for life in state.past for turn_id in life.answers}


def test_a_score_that_is_written_again_after_its_session_was_forgotten_is_no_news() -> None:
    session = one_turn()
    session.done()
    flow = Flow(judge(1), teacher=Tutor())
    flow.run(session.written)
    flow.log.append(HINTS, flow.log.of(TeacherScored)[0])
    flow.run([])
    assert nothing_left(flow)


@given(MOVES, SEEDS)
def test_a_done_session_leaves_no_scores_behind(moves: list[str], seed: int) -> None:
    flow = Flow(teacher=Tutor())
    flow.run(conversation([*moves, "ask", "done"]), random.Random(seed))
    assert nothing_left(flow)


def test_no_sample_is_made_before_the_teacher_has_spoken() -> None:
    flow = Flow(judge(-1), teacher=Tutor())
    waiting = [*one_turn().written]
    log = Flow(judge(-1)).run(waiting)
    state: State | None = None
    made: list[Event] = []
    asked: list[Scoring] = []
    for record in (record for topic in READ for record in log.topics[topic]):
        follows = observe(state, record.event, SampleRules(Letters(), asks=TeacherRule("tutor@test")))
        state, made, asked = follows.state, [*made, *follows.events], [*asked, *follows.calls]
    assert (made, len(asked)) == ([], 1)
    assert flow.run(waiting).of(SampleAssembled)[0].teacher == "tutor@test"


def test_of_two_scorings_of_one_hint_the_first_counts() -> None:
    log = Flow(judge(-1), teacher=Tutor()).run(one_turn().written)
    [scored] = log.of(TeacherScored)
    [sample] = log.of(SampleAssembled)
    other = replace(scored, teacher_logprobs=(-9.0,) * len(sample.response_ids))
    state: State | None = None
    made: list[Event] = []
    events = [record.event for topic in (HINTS, EXCHANGES, TURNS, VERDICTS) for record in log.topics[topic]]
    for event in (*events[:2], other, *events[2:], other):
        state, new, _ = observe(state, event, SampleRules(Letters(), asks=TeacherRule("tutor@test")))
        made += new
    assert made == [sample]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("about", ["another teacher", "another hint"])
def test_scores_of_something_else_are_not_used(about: str, waits: bool) -> None:
    log = Flow(judge(-1), teacher=Tutor()).run(one_turn().written)
    changed = {"another teacher": {"teacher": "who@else"}, "another hint": {"scored_sha256": "0" * 64}}[about]
    state: State | None = None
    made: list[Event] = []
    for record in (record for topic in READ for record in log.topics[topic]):
        event = record.event
        event = replace(event, **changed) if isinstance(event, TeacherScored) else event  # type: ignore[arg-type]
        state, new, _ = observe(state, event, SampleRules(Letters(), asks=TeacherRule("tutor@test", waits=waits)))
        made += new
    hints = [sample.hint for sample in made if isinstance(sample, SampleAssembled)]
    assert hints == ([] if waits else [None])


@pytest.mark.parametrize("score", [-1, 0])
def test_what_a_teacher_will_not_score_is_learned_from_without_the_hint_or_not_at_all(score: int) -> None:
    log = Flow(judge(score), teacher=Tutor(too_long=1)).run(one_turn().written)
    [scored] = log.of(TeacherScored)
    assert (scored.status, scored.teacher_logprobs, scored.student_version) == (TeacherStatus.REFUSED, None, None)
    assert scored.error == "the input is longer than the model's context"
    if score == 0:
        [refused] = log.of(SampleRefused)
        assert (refused.reason, log.of(SampleAssembled)) == (RefusalReason.HINT_UNSCORED, [])
    else:
        [sample] = log.of(SampleAssembled)
        assert (sample.reward, sample.hint, sample.hinted_prompt_ids, sample.teacher) == (-1, None, None, None)
        assert log.of(SampleRefused) == []


def test_an_answer_whose_hint_alone_may_count_is_refused_where_that_is_not_scored() -> None:
    session = one_turn()
    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=None, max_tokens=64, seed=None, stop=())
    events = [replace(event, sampling=greedy) for event in session.written]  # type: ignore[call-arg]
    flow = Flow(judge(1), learns=HOWEVER_DRAWN, teacher=Tutor(too_long=1))
    log = flow.run(events)
    assert [refused.reason for refused in log.of(SampleRefused)] == [RefusalReason.HINT_UNSCORED]
    assert log.of(SampleAssembled) == []


def test_a_scoring_that_failed_does_not_stand_in_the_way_of_a_later_one() -> None:
    [scored] = Flow(judge(1), teacher=Tutor()).run(one_turn().written).of(TeacherScored)
    lost = {"teacher_logprobs": None, "student_logprobs": None, "student_version": None, "error": "no answer"}
    failed = replace(scored, status=TeacherStatus.FAILED, **lost)  # type: ignore[arg-type]
    assert failed.scoring_id == scored.scoring_id == scored.event_id
    assert len({failed.event_id, replace(failed, scored_at_ms=9).event_id, scored.event_id}) == 3
