"""What a person says of an answer is its hint, with a judge or without."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import (
    NOBODY,
    Event,
    ExchangeCompleted,
    FeedbackSource,
    Question,
    RefusalReason,
    SampleAssembled,
    SampleRefused,
    TeacherScored,
)
from clawstream.samples.hinted import with_hint
from tests.flow import Flow, Oracle, Tutor
from tests.sessions import Letters, Session, assistant, user
from tests.unit.refresh.refresher import FakeRefresher, of_refreshed, too_late
from tests.unit.samples.test_feedback import asked_twice, newest
from tests.unit.samples.test_flow import GOOD, MOVES, SEEDS, UNDECIDED, conversation

WORDS, OTHERS = "Show the steps first.", "Answer in one word."
HINTED = Oracle({Question.SCORE: ["\\boxed{-1}"], Question.HINT: ["\\boxed{1} [HINT_START]By the judge.[HINT_END]"]})
SAID = st.lists(
    st.tuples(st.integers(0, 11), st.sampled_from([None, -1.0, 1.0]), st.sampled_from([None, WORDS, OTHERS])),
    max_size=6,
)
Said = tuple[float | None, str | None]


def told(*said: Said, before: Sequence[Said] = ()) -> list[Event]:
    """Two answers, of which the first has a next state, and what a person said of it, in between and at the end."""
    session = Session()
    first = session.ask([user("2+2?")], "4")
    for score, text in before:
        session.rate(first.exchange_id, score, text=text)
    session.ask([user("2+2?"), assistant("4"), user("thanks")], "welcome")
    for score, text in said:
        session.rate(first.exchange_id, score, text=text)
    return session.written


@pytest.mark.parametrize(
    ("score", "text", "source", "hint"),
    [
        (None, WORDS, FeedbackSource.PERSON, WORDS),
        (-1.0, f"  {WORDS}\n", FeedbackSource.PERSON, WORDS),
        (0.0, WORDS, FeedbackSource.PERSON, WORDS),
        (None, "a\ud800b\0 and so on", FeedbackSource.PERSON, "a\ufffdb\ufffd and so on"),
        (0.5, WORDS, FeedbackSource.PERSON, None),
        (-1.0, "  wrong!!!!! ", FeedbackSource.PERSON, None),
        (-1.0, None, FeedbackSource.PERSON, None),
        (-1.0, WORDS, FeedbackSource.ENVIRONMENT, None),
        (-1.0, "my_rules:plain", FeedbackSource.HEURISTIC, None),
    ],
)
def test_a_hint_is_what_a_person_says_in_more_than_a_few_letters_and_not_in_praise(
    score: float | None, text: str | None, source: FeedbackSource, hint: str | None
) -> None:
    assert Session().rate("turn", score, source, text=text).hint == hint


def test_words_teach_without_a_judge_as_a_judge_s_hint_does() -> None:
    events = told((None, WORDS))
    [sample] = Flow(judged=False).run(events).of(SampleAssembled)
    assert (sample.judge, sample.hint, sample.hint_by_person, sample.num_feedback) == (NOBODY, WORDS, True, 1)
    assert (sample.reward, sample.person_reward, sample.total_reward) == (None, None, None)
    hinted = with_hint([user("2+2?")], WORDS)
    assert sample.hinted_prompt_ids == Letters().prompt_ids(hinted, {"model": "policy"})


@pytest.mark.parametrize("judge", [HINTED, Oracle(GOOD), Oracle(UNDECIDED)])
def test_words_win_over_a_judge_s_hint_whether_they_come_before_it_or_after(judge: Oracle) -> None:
    [first] = Flow(judge).run(told(before=[(-1.0, WORDS)])).of(SampleAssembled)
    *_, last = Flow(judge).run(told((-1.0, WORDS))).of(SampleAssembled)
    for sample in (first, last):
        assert (sample.hint, sample.hint_by_person, sample.total_reward) == (WORDS, True, -1.0)
        assert sample.judge == judge.name


def test_newer_words_make_a_newer_sample_and_later_praise_takes_them_back() -> None:
    log = Flow(HINTED).run(told((None, WORDS), (-1.0, OTHERS), (-1.0, OTHERS), (1.0, None)))
    samples = log.of(SampleAssembled)
    assert [(one.hint, one.hint_by_person, one.num_feedback, one.total_reward) for one in samples] == [
        ("By the judge.", False, None, -1.0),
        (WORDS, True, 1, -1.0),
        (OTHERS, True, 2, -1.0),
        ("By the judge.", False, 3, 1.0),
    ]
    assert len({one.sample_id for one in samples}) == 4


def test_samples_of_the_same_number_and_scores_but_of_other_words_are_two() -> None:
    [sample] = Flow(judged=False).run(told((None, WORDS))).of(SampleAssembled)
    assert replace(sample, hint=OTHERS).sample_id != sample.sample_id
    judged = replace(sample, hint_by_person=False)
    assert replace(judged, hint=OTHERS).sample_id == judged.sample_id


def test_words_on_an_answer_without_a_next_state_make_a_sample_and_words_that_are_no_hint_none() -> None:
    session = Session()
    first = session.ask([user("a")], "b")
    session.rate(first.exchange_id, None, text=WORDS)
    session.done()
    [sample] = Flow().run(session.written).of(SampleAssembled)
    assert (sample.judge, sample.hint) == (NOBODY, WORDS)
    log = Flow(Oracle(UNDECIDED)).run(asked_twice(after=[(0, None)]))
    assert log.of(SampleAssembled) == []
    assert [one.reason for one in log.of(SampleRefused)] == [RefusalReason.NO_SIGNAL]


def test_words_are_scored_by_an_engine_that_teaches_also_without_a_judge() -> None:
    tutor = Tutor()
    log = Flow(judged=False, teacher=tutor).run(told((None, WORDS), (None, OTHERS)))
    assert [one.status for one in log.of(TeacherScored)] == ["scored", "scored"]
    samples = log.of(SampleAssembled)
    assert [(one.hint, one.teacher) for one in samples][-1] == (OTHERS, tutor.name)
    assert all(one.teacher_logprobs is not None for one in samples)


@pytest.mark.parametrize("judged", [False, True])
def test_an_answer_given_again_is_scored_by_a_person_s_words_and_again_by_newer_ones(judged: bool) -> None:
    refresher = FakeRefresher()
    flow = Flow(Oracle(GOOD), judged=judged, refresher=refresher)
    log = flow.run(told((None, WORDS)))
    *_, late = log.of(SampleAssembled)
    flow.run([too_late(late)])
    [one] = of_refreshed(log.of(SampleAssembled))
    assert (one.hint, one.hint_by_person, one.total_reward, one.judge) == (WORDS, True, None, late.judge)
    assert one.hinted_prompt_ids == late.hinted_prompt_ids
    flow.run([Session().rate(late.turn_id, 0.0, name="again", text=OTHERS)])
    assert [one.hint for one in of_refreshed(log.of(SampleAssembled))] == [WORDS, OTHERS]
    assert len(refresher.asked) == 1


@given(MOVES, SAID, st.booleans(), SEEDS)
def test_any_interleaving_and_any_restart_comes_to_the_same_hint(
    moves: list[str], said: list[tuple[int, float | None, str | None]], judged: bool, seed: int
) -> None:
    events = conversation([move for move in moves if move != "done"])
    answers = [event.exchange_id for event in events if isinstance(event, ExchangeCompleted)]
    for number, (back, score, text) in enumerate(said):
        if answers:
            turn_id = answers[-1 - back % len(answers)]
            at = 1 + next(n for n, one in enumerate(events) if getattr(one, "exchange_id", None) == turn_id)
            given_ = Session().rate(turn_id, score, name=f"w{number}", text=text)
            events = [*events[:at], given_, *events[at:]] if number % 2 else [*events, given_]
    calm = Flow(judged=judged).run(events)
    wild = Flow(judged=judged).run(events, random.Random(seed), restarts=0.15)
    assert newest(wild) == newest(calm)
