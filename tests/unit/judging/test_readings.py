"""Readings: the last box after the thinking, or nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import Question
from clawstream.judging.votes import VoteReading, read

HINT = "Leave out the headings and keep the steps."


@given(st.text(), st.sampled_from([-1, 0, 1]))
def test_a_box_at_the_end_is_read_whatever_stands_before_it(text: str, score: int) -> None:
    assert read(Question.SCORE, f"{text.replace('<think>', '')}\n\\boxed{{{score}}}") == VoteReading(
        score=score, hint=None
    )


@given(st.lists(st.sampled_from(["\\boxed{", "1", "-", "0", "}", "{", "[HINT_START]", "[HINT_END]", "x"])).map("".join))
def test_whatever_is_read_is_a_score_that_the_question_allows(text: str) -> None:
    reading = read(Question.HINT, text)
    assert reading is None or (reading.score in (-1, 1) and "\\boxed{" in text)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("\\boxed{1} at first, but then \\boxed{-1}", -1),
        ("\\boxed{ +1 }", 1),
        ("\\boxed{\u22121}", -1),
        ("<think>\\boxed{-1}?</think> \\boxed{0}", 0),
    ],
)
def test_a_score_is_read(text: str, score: int) -> None:
    assert read(Question.SCORE, text) == VoteReading(score=score, hint=None)


@pytest.mark.parametrize(
    "text", ["", "1", "boxed{1}", "\\boxed{2}", "\\boxed{1} or \\boxed{maybe}", "\\boxed{1", "<think>\\boxed{1}"]
)
def test_what_is_no_verdict_is_unreadable_and_not_a_zero(text: str) -> None:
    assert read(Question.SCORE, text) is None


def test_a_hint_question_takes_no_zero() -> None:
    assert read(Question.HINT, "\\boxed{0}") is None


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (f"\\boxed{{1}}\n[HINT_START]\n{HINT}\n[HINT_END]", HINT),
        (f"[HINT_START]one[HINT_END] \\boxed{{1}} [HINT_START]{HINT}[HINT_END]", HINT),
        ("[HINT_START]two\nlines[HINT_END]\\boxed{1}", "two\nlines"),
        ("\\boxed{1}", None),
        ("\\boxed{1}[HINT_START]  [HINT_END]", None),
        (f"\\boxed{{-1}} [HINT_START]{HINT}[HINT_END]", None),
        (f"<think>[HINT_START]no[HINT_END]</think>\\boxed{{1}}[HINT_START]{HINT}[HINT_END]", HINT),
    ],
)
def test_a_hint_is_the_last_block_of_a_vote_that_says_there_is_one(text: str, hint: str | None) -> None:
    reading = read(Question.HINT, text)
    assert reading is not None
    assert reading.hint == hint


def test_a_score_question_reads_no_hint() -> None:
    assert read(Question.SCORE, f"\\boxed{{1}}[HINT_START]{HINT}[HINT_END]") == VoteReading(score=1, hint=None)
