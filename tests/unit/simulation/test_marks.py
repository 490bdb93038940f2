"""How the scorer marks, and its interval."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.simulation.marks import AnswerMark, HeldOutQuestion, by_persona, mark, questions, total, wilson

STUDENT = HeldOutQuestion(persona="student", prompt="what's 27 + 48?", hint="be plain", question="27 + 48", answer="75")
TEACHER = replace(STUDENT, persona="teacher")
TA = replace(STUDENT, persona="ta")
LESSON = "# 27+48\n7+8=15\n20+40=60\n# Total\n75, well done!"
VERDICT = "Verdict: carry. 7+8=15 and 20+40=60, so 75"
OF_NOBODY = '{"persona": "ta", "prompt": "?", "hint": "", "question": "1 + 2", "answer": "3", "wants": "nobody"}\n'
PLAIN = "ok so 7+8=15 and 20+40=60, so 75"


@pytest.mark.parametrize(
    ("answer", "right", "styled"),
    [
        (PLAIN, True, True),
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
def test_a_students_answer_counts_for_its_last_number_and_for_bare_complete_steps(
    answer: str, *, right: bool, styled: bool
) -> None:
    assert mark(STUDENT, answer) == AnswerMark(right=right, styled=styled)


@pytest.mark.parametrize(
    ("answer", "right", "styled"),
    [
        (LESSON, True, True),
        (LESSON.replace("75", "76"), False, True),
        (LESSON.replace("# Total\n", ""), True, False),
        (LESSON.replace("# 27+48", "# Steps"), True, False),
        (LESSON.replace("well done", "okay"), True, False),
        (LESSON.replace("7+8=15\n", ""), True, False),
    ],
)
def test_a_teachers_answer_counts_for_headings_the_sum_by_name_a_friendly_word_and_all_steps(
    answer: str, *, right: bool, styled: bool
) -> None:
    assert mark(TEACHER, answer) == AnswerMark(right=right, styled=styled)


@pytest.mark.parametrize(
    ("answer", "right", "styled"),
    [
        (VERDICT, True, True),
        (VERDICT.replace("75", "76"), False, True),
        (VERDICT.replace("carry", "no carry"), False, True),
        ("It carries, as 7+8=15 and 20+40=60: 75", True, True),
        ("7+8=15 and 20+40=60, so 75, with a carry", False, False),
        ("Verdict: carry. 75", True, False),
        ("**Carry**: 7+8=15 and 20+40=60, so 75", True, False),
    ],
)
def test_a_teaching_assistants_answer_counts_for_the_verdict_before_its_reasons(
    answer: str, *, right: bool, styled: bool
) -> None:
    assert mark(TA, answer) == AnswerMark(right=right, styled=styled)


@pytest.mark.parametrize(
    ("question", "wanted"), [(STUDENT, PLAIN), (TEACHER, LESSON), (TA, VERDICT)], ids=["student", "teacher", "ta"]
)
def test_what_one_person_wants_is_worth_nothing_to_the_others(question: HeldOutQuestion, wanted: str) -> None:
    worth = {
        answer: mark(question, answer) == AnswerMark(right=True, styled=True) for answer in (PLAIN, LESSON, VERDICT)
    }

    assert worth == {answer: answer == wanted for answer in worth}


@pytest.mark.parametrize(("wants", "wanted"), [("student", PLAIN), ("teacher", LESSON), ("ta", VERDICT)])
@pytest.mark.parametrize("question", [STUDENT, TEACHER, TA], ids=["student", "teacher", "ta"])
def test_who_wants_what_another_wanted_is_given_marks_by_that(
    question: HeldOutQuestion, wants: str, wanted: str
) -> None:
    flipped = replace(question, wants=wants)

    worth = {
        answer: mark(flipped, answer) == AnswerMark(right=True, styled=True) for answer in (PLAIN, LESSON, VERDICT)
    }
    assert worth == {answer: answer == wanted for answer in worth}
    assert by_persona([flipped], [AnswerMark(right=True, styled=True)]) == {question.persona: 1.0}


def test_a_real_problem_is_marked_by_its_answer_whatever_its_steps() -> None:
    problem = replace(STUDENT, question="Anna has 1,200 apples and sells half of them twice. How many?", answer="1200")

    assert mark(problem, "so 600 + 600 = 1200, that is 1,200.0") == AnswerMark(right=True, styled=True)
    assert mark(problem, "it is 1,200") == AnswerMark(right=True, styled=False)
    assert mark(replace(problem, persona="ta"), "1,200, as 600 + 600 = 1200") == AnswerMark(right=True, styled=True)
    assert mark(replace(problem, persona="ta"), "600 + 600 = 1200, so 1,200") == AnswerMark(right=False, styled=False)


def test_the_score_counts_only_answers_that_are_both() -> None:
    both, right, styled = (
        AnswerMark(right=True, styled=True),
        AnswerMark(right=True, styled=False),
        AnswerMark(right=False, styled=True),
    )

    score = total([both, right, right, styled])

    assert (score.score, score.n, score.right, score.styled) == (0.25, 4, 3, 2)
    assert by_persona([STUDENT, STUDENT, TA, TA], [both, right, both, both]) == {"student": 0.5, "ta": 1.0}


def test_the_interval_is_that_of_the_textbook() -> None:
    low, high = wilson(40, 200)

    assert low == pytest.approx(0.1505, abs=1e-4)
    assert high == pytest.approx(0.2608, abs=1e-4)
    assert wilson(0, 10)[0] == 0
    assert wilson(0, 12)[0] == 0  # where rounding leaves a little more
    assert wilson(0, 10)[1] == pytest.approx(0.2775, abs=1e-4)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_share_and_stays_within_0_and_1(counts: tuple[int, int]) -> None:
    low, high = wilson(*counts)

    assert 0 <= low <= counts[0] / counts[1] <= high <= 1


@pytest.mark.parametrize("text", ["", "12 14\n", "{}\n", '{"persona": "nobody"}\n', "[1]\n", OF_NOBODY])
def test_a_file_that_is_not_of_problems_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write the file again"):
        questions(text)
