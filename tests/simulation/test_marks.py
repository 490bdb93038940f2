"""How the scorer marks, and its interval."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.simulation.marks import Mark, Question, mark, questions, total, wilson

ASKED = Question(left=27, right=48)


@pytest.mark.parametrize(
    ("answer", "right", "styled"),
    [
        ("ok so 7+8=15 and 20+40=60, so 75", True, True),
        ("7 + 8 = 15, 20 + 40 = 60, that makes 75", True, True),
        ("7+8=15 and 20+40=60, so 76", False, True),
        ("75", True, False),
        ("20+40=60, so 75", True, False),
        ("## Steps\n**7+8=15**\n**20+40=60**\n## Answer\n**75**", True, False),
        ("1. 7+8=15\n2. 20+40=60\n75", True, False),
        ("5+8=15 and 20+40=60, so 75", True, False),
        ("", False, False),
    ],
)
def test_an_answer_counts_for_its_last_number_and_for_bare_complete_steps(
    answer: str, *, right: bool, styled: bool
) -> None:
    assert mark(ASKED, answer) == Mark(right=right, styled=styled)


def test_the_score_counts_only_answers_that_are_both() -> None:
    both, right, styled = Mark(right=True, styled=True), Mark(right=True, styled=False), Mark(right=False, styled=True)

    score = total([both, right, right, styled])

    assert (score.score, score.n, score.right, score.styled) == (0.25, 4, 3, 2)


def test_the_interval_is_that_of_the_textbook() -> None:
    low, high = wilson(40, 200)

    assert low == pytest.approx(0.1505, abs=1e-4)
    assert high == pytest.approx(0.2608, abs=1e-4)
    assert wilson(0, 10)[0] == 0
    assert wilson(0, 10)[1] == pytest.approx(0.2775, abs=1e-4)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_share_and_stays_within_0_and_1(counts: tuple[int, int]) -> None:
    low, high = wilson(*counts)

    assert 0 <= low <= counts[0] / counts[1] + 1e-12
    assert counts[0] / counts[1] - 1e-12 <= high <= 1


@pytest.mark.parametrize("text", ["", "12\n", "1 2 3\n", "a b\n"])
def test_a_file_that_is_not_of_sums_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|invalid literal"):
        questions(text)
