"""What the simulated policy is built on, marked by those who later talk to it."""

import random

from hypothesis import given
from hypothesis import strategies as st

from clawstream.simulation import opinions, reactions
from clawstream.simulation.marks import HeldOutQuestion, mark
from clawstream.simulation.opinions import Wish
from clawstream.simulation.policy import dialogues
from clawstream.simulation.policy.dialogues import Mix, Style
from clawstream.simulation.policy.recipe import Recipe
from clawstream.simulation.problems import Sum, SumSet, all_of
from clawstream.simulation.reactions import Impression, PersonTask, impression

SUMS = st.sampled_from(all_of(SumSet.BASE))
SOURCES = st.integers(0, 2**32).map(random.Random)


def _task(problem: Sum) -> PersonTask:
    return PersonTask(persona="student", question=problem.text, answer=str(problem.total))


def _question(problem: Sum) -> HeldOutQuestion:
    return HeldOutQuestion(
        persona="student", prompt=problem.text, hint="", question=problem.text, answer=str(problem.total)
    )


@given(SUMS, SOURCES)
def test_a_plain_answer_is_right_and_styled_for_scorer_and_student(problem: Sum, rng: random.Random) -> None:
    answer = dialogues.answer(problem, Style.PLAIN, rng)
    marks = mark(_question(problem), answer)

    assert (marks.right, marks.styled) == (True, True)
    assert impression(_task(problem), answer) is Impression.GOOD
    assert len(answer) <= 60


@given(SUMS, SOURCES)
def test_a_formatted_answer_is_right_and_strikes_the_student_as_stiff(problem: Sum, rng: random.Random) -> None:
    answer = dialogues.answer(problem, Style.FORMATTED, rng)
    marks = mark(_question(problem), answer)

    assert (marks.right, marks.styled) == (True, False)
    assert impression(_task(problem), answer) is Impression.OFF_STYLE
    assert len(answer) <= 60


@given(SUMS, SOURCES)
def test_an_answer_to_a_hint_is_always_plain(problem: Sum, rng: random.Random) -> None:
    hinted = Mix(hinted=1.0).dialogue(problem, rng)
    asked, _, hint = hinted.messages[-1]["content"].partition(f"\n\n{dialogues.HINT_MARKER}\n")

    assert hint in dialogues.HINTS
    assert problem.text in asked
    assert mark(_question(problem), hinted.answer).styled


@given(SUMS, SOURCES)
def test_after_a_correction_the_answer_keeps_its_style_and_mends_its_number(problem: Sum, rng: random.Random) -> None:
    corrected = Mix(hinted=0, complaint=0, correction=1).dialogue(problem, rng)
    question = _question(problem)
    before, after = mark(question, corrected.messages[1]["content"]), mark(question, corrected.answer)

    assert (before.right, after.right) == (False, True)
    assert ("**" in corrected.messages[1]["content"]) == ("**" in corrected.answer)


def test_the_base_is_built_on_sums_of_its_own_group_only() -> None:
    asked = {d.messages[0]["content"].split("\n")[0] for d in Recipe().dialogues(2000)}
    foreign = [s for group in (SumSet.STUDENTS, SumSet.SCORED) for s in all_of(group)]

    assert not {q.format(question=s.text) for s in foreign for q in dialogues.QUESTIONS} & asked


def test_the_policy_has_met_every_wording_of_student_judge_and_scorer() -> None:
    manner = reactions.MANNERS["student"]
    assert set(manner.questions) <= set(dialogues.QUESTIONS)
    assert set(reactions.REACTIONS[Impression.WRONG]) <= set(dialogues.CORRECTIONS)
    assert set(reactions.REACTIONS[Impression.GOOD]) <= set(dialogues.THANKS)
    complaints = {*manner.complaints, *reactions.REACTIONS[Impression.STEPS_MISSING]}
    assert complaints <= set(dialogues.COMPLAINTS)
    assert {*opinions.HINTS[Wish.PLAIN], *opinions.HABITS["student"].corrections} <= set(dialogues.HINTS)


def test_about_a_fifth_of_first_answers_is_plain() -> None:
    first = [d for d in Recipe().dialogues(4000) if len(d.messages) == 1 and "hint" not in d.messages[0]["content"]]

    assert 0.15 < sum("#" not in d.answer for d in first) / len(first) < 0.25
