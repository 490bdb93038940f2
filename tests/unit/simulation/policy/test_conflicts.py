"""What a base policy of three people is built on, marked by those who later talk to it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.simulation import opinions, reactions
from clawstream.simulation.marks import AnswerMark, HeldOutQuestion, mark
from clawstream.simulation.opinions import Wish
from clawstream.simulation.policy import lessons
from clawstream.simulation.policy.dialogues import CORRECTIONS, HINT_MARKER, THANKS
from clawstream.simulation.policy.lessons import Conflict
from clawstream.simulation.policy.recipe import RECIPES, Base
from clawstream.simulation.problems import Sum, SumSet, all_of
from clawstream.simulation.reactions import Impression, PersonTask, impression

SUMS = st.sampled_from(all_of(SumSet.BASE))
SOURCES = st.integers(0, 2**32).map(random.Random)
PERSONAS = {Wish.PLAIN: "student", Wish.HEADED: "teacher", Wish.VERDICT: "ta"}


def _asked(problem: Sum, persona: str) -> HeldOutQuestion:
    return HeldOutQuestion(
        persona=persona, prompt=problem.text, hint="", question=problem.text, answer=str(problem.total)
    )


def _style_of(problem: Sum, answer: str) -> Wish:
    (style,) = [
        s for s, name in PERSONAS.items() if mark(_asked(problem, name), answer) == AnswerMark(right=True, styled=True)
    ]
    return style


@given(SUMS, SOURCES, st.sampled_from(Wish))
def test_each_style_is_right_for_one_person_and_off_for_the_others(
    problem: Sum, rng: random.Random, style: Wish
) -> None:
    answer = lessons.answer(problem, style, rng)
    felt = {
        name: impression(PersonTask(persona=name, question=problem.text, answer=str(problem.total)), answer)
        for name in PERSONAS.values()
    }

    assert _style_of(problem, answer) is style
    assert felt == {
        name: Impression.GOOD if name == PERSONAS[style] else Impression.OFF_STYLE for name in PERSONAS.values()
    }
    assert len(answer) <= 60


@given(SUMS, SOURCES)
def test_a_hint_says_which_style_it_is_whoever_asks(problem: Sum, rng: random.Random) -> None:
    hinted = Conflict(hinted=1.0).dialogue(problem, rng)
    hint = hinted.messages[-1]["content"].partition(f"\n\n{HINT_MARKER}\n")[2]

    assert hint in opinions.HINTS[_style_of(problem, hinted.answer)]


@given(SUMS, SOURCES)
def test_after_any_complaint_the_answer_is_in_the_style_of_who_asked(problem: Sum, rng: random.Random) -> None:
    mix = Conflict(hinted=0, neutral=0, complaint=0.5, vague=0.5)
    redone = mix.dialogue(problem, rng)
    question, first, complaint = (message["content"] for message in redone.messages)
    style = _style_of(problem, redone.answer)

    assert question in {q.format(question=problem.text) for q in lessons.QUESTIONS[style]}
    assert complaint in {*lessons.COMPLAINTS[style], *reactions.VAGUE}
    assert _style_of(problem, first) is not style


@pytest.mark.parametrize(("base", "low", "high"), [("standard", 0.15, 0.30), ("hard", 0.03, 0.10)])
def test_the_stated_share_of_first_answers_is_as_the_one_who_asks_wants_it(base: Base, low: float, high: float) -> None:
    first = [
        d for d in RECIPES[base].dialogues(6000) if len(d.messages) == 1 and HINT_MARKER not in d.messages[0]["content"]
    ]
    asked = {
        wording.split("{question}")[0]: style for style, wordings in lessons.QUESTIONS.items() for wording in wordings
    }
    wanted = [
        next(style for start, style in asked.items() if d.messages[0]["content"].startswith(start)) for d in first
    ]
    given_ = [
        Wish.HEADED if "#" in d.answer else Wish.VERDICT if d.answer.startswith("Verdict") else Wish.PLAIN
        for d in first
    ]

    assert low < sum(w is g for w, g in zip(wanted, given_, strict=True)) / len(first) < high


def test_the_policy_has_met_every_wording_of_the_people_and_their_judge() -> None:
    for style, persona in PERSONAS.items():
        manner = reactions.MANNERS[persona]
        assert set(manner.questions) == set(lessons.QUESTIONS[style])
        assert {*manner.complaints} <= set(lessons.COMPLAINTS[style])
    assert {*reactions.REACTIONS[Impression.WRONG]} <= set(CORRECTIONS)
    assert {*reactions.REACTIONS[Impression.GOOD]} <= set(THANKS)
    habits = opinions.HABITS["all"]
    assert {*habits.corrections, *habits.inventions} == set(lessons.NEUTRAL_HINTS)


@pytest.mark.parametrize("base", ["standard", "hard"])
def test_the_base_is_built_on_sums_of_its_own_group_only(base: Base) -> None:
    asked = {d.messages[0]["content"].split("\n")[0] for d in RECIPES[base].dialogues(2000)}
    foreign = [s for group in (SumSet.STUDENTS, SumSet.SCORED) for s in all_of(group)]
    wordings = [wording for wordings in lessons.QUESTIONS.values() for wording in wordings]

    assert not {q.format(question=s.text) for s in foreign for q in wordings} & asked
