"""How people read an answer and what they say to it."""

import random
from dataclasses import replace

import pytest

from clawstream.simulation.problems import SUBJECTS, UNRELATED
from clawstream.simulation.reactions import MANNERS, VAGUE, Impression, PersonTask, ask, flip, impression, react, tasks

STUDENT = PersonTask(persona="student", question="27 + 48", answer="75")
TEACHER = replace(STUDENT, persona="teacher")
TA = replace(STUDENT, persona="ta")


@pytest.mark.parametrize(
    ("answer", "felt"),
    [
        ("7+8=15 and 20+40=60, so 75", Impression.GOOD),
        ("7 + 8 is 15, 20 + 40 is 60, so 75", Impression.GOOD),
        ("it's 75", Impression.STEPS_MISSING),
        ("7+8=15 and 20+40=60, so 76", Impression.WRONG),
        ("no idea", Impression.WRONG),
        ("## Answer\n75", Impression.OFF_STYLE),
        ("7+8=15 and 20+40=60, so **75**", Impression.OFF_STYLE),
        ("- 7+8=15\n- 20+40=60\n75", Impression.OFF_STYLE),
        ("1. 7+8=15\n2. 20+40=60\n76", Impression.OFF_STYLE),
    ],
)
def test_an_answer_strikes_a_student_by_its_look_then_its_number_then_its_steps(answer: str, felt: Impression) -> None:
    assert impression(STUDENT, answer) is felt


@pytest.mark.parametrize(
    ("task", "answer", "felt"),
    [
        (TEACHER, "# 27+48\n7+8=15\n20+40=60\n# Total\n75, well done!", Impression.GOOD),
        (TEACHER, "# 27+48\n7+8=15\n20+40=60\n# Total\n76, well done!", Impression.WRONG),
        (TEACHER, "# 27+48\n# Total\n75, well done!", Impression.STEPS_MISSING),
        (TEACHER, "# 27+48\n7+8=15\n20+40=60\n# Total\n75", Impression.OFF_STYLE),
        (TEACHER, "ok so 7+8=15 and 20+40=60, so 75", Impression.OFF_STYLE),
        (STUDENT, "Verdict: carry. 7+8=15 and 20+40=60, so 75", Impression.OFF_STYLE),
        (TA, "Verdict: carry. 7+8=15 and 20+40=60, so 75", Impression.GOOD),
        (TA, "Verdict: no carry. 7+8=15 and 20+40=60, so 75", Impression.WRONG),
        (TA, "Verdict: carry. 7+8=15 and 20+40=60, so 76", Impression.WRONG),
        (TA, "Verdict: carry. 75", Impression.STEPS_MISSING),
        (TA, "ok so 7+8=15 and 20+40=60, so 75", Impression.OFF_STYLE),
        (TA, "- 7+8=15\n- 20+40=60\n- **75**", Impression.OFF_STYLE),
        (replace(TA, question="20 + 41", answer="61"), "No carry: 0+1=1, 20+40=60, so 61", Impression.GOOD),
    ],
)
def test_an_answer_strikes_each_person_by_what_they_want(task: PersonTask, answer: str, felt: Impression) -> None:
    assert impression(task, answer) is felt


def test_the_same_random_source_asks_and_reacts_in_the_same_words() -> None:
    first, again = random.Random(7), random.Random(7)

    assert ask(STUDENT, first) == ask(STUDENT, again)
    assert react(STUDENT, Impression.OFF_STYLE, first, hint_share=0.5) == react(
        STUDENT, Impression.OFF_STYLE, again, hint_share=0.5
    )


@pytest.mark.parametrize("task", [STUDENT, TEACHER, TA])
def test_about_the_stated_share_of_complaints_about_the_style_says_what_is_wanted(task: PersonTask) -> None:
    rng = random.Random(3)
    said = [react(task, Impression.OFF_STYLE, rng, hint_share=0.5) for _ in range(2000)]

    assert set(said) == {*MANNERS[task.persona].complaints, *VAGUE}
    assert 0.45 < sum(words not in VAGUE for words in said) / 2000 < 0.55


def test_nobody_asks_or_complains_about_the_style_in_the_words_of_another() -> None:
    words = [{*manner.questions, *manner.about_texts, *manner.complaints} for manner in MANNERS.values()]

    assert len(set.union(*words)) == sum(map(len, words))


def test_after_a_flip_a_person_asks_as_before_and_wants_what_another_wanted() -> None:
    before = replace(TEACHER, flipped="student")
    after = flip(before)
    lesson, plain = "# 27+48\n7+8=15\n20+40=60\n# Total\n75, well done!", "ok so 7+8=15 and 20+40=60, so 75"

    assert ask(after, random.Random(1)) == ask(before, random.Random(1))
    assert (impression(before, lesson), impression(before, plain)) == (Impression.GOOD, Impression.OFF_STYLE)
    assert (impression(after, lesson), impression(after, plain)) == (Impression.OFF_STYLE, Impression.GOOD)
    said = {react(after, Impression.OFF_STYLE, random.Random(seed), hint_share=1.0) for seed in range(40)}
    assert said == {*MANNERS["student"].complaints}
    checked = flip(replace(STUDENT, flipped="ta"))
    assert impression(checked, "Verdict: no carry. 7+8=15 and 20+40=60, so 75") is Impression.WRONG
    assert flip(STUDENT).wish == "student"


def test_a_text_is_asked_about_in_words_that_fit_a_text() -> None:
    task = replace(TA, question="Anna has 3 apples and buys 4. How many has she?", answer="7")

    asked = {ask(task, random.Random(seed)) for seed in range(20)}

    assert asked == {wording.format(question=task.question) for wording in MANNERS["ta"].about_texts}


@pytest.mark.parametrize(
    "line",
    [
        "5 six",
        "{}",
        '{"persona": "nobody", "question": "1 + 2", "answer": "3"}',
        '{"persona": "ta", "question": "1 + 2", "answer": "3", "flipped": "nobody"}',
        '{"persona": "ta", "question": "what now?", "answer": "", "subject": "nothing"}',
    ],
)
def test_a_line_that_is_no_task_is_named(line: str) -> None:
    good = '{"persona": "ta", "question": "1 + 2", "answer": "3"}'

    with pytest.raises(ValueError, match="line 2 is"):
        tasks(f"{good}\n{line}\n")


@pytest.mark.parametrize("name", SUBJECTS)
def test_of_another_subject_the_same_is_said_of_each_answer_and_a_sum_is_no_such_subject(name: str) -> None:
    subject = SUBJECTS[name]
    for request in subject.requests:
        task = replace(STUDENT, question=request, answer="", subject=name)
        said = {
            react(task, impression(task, answer), random.Random(seed), hint_share=0.0)
            for answer in ("", "## Answer\n75", "ok so 7+8=15 and 20+40=60, so 75")
            for seed in range(5)
        }
        assert ask(task, random.Random(0)) == request
        assert said == {subject.reaction}
        assert task.speaker == UNRELATED
    assert STUDENT.speaker == "student"


def test_there_are_twelve_other_subjects_in_words_of_their_own() -> None:
    words = [word for subject in SUBJECTS.values() for word in (*subject.requests, subject.reaction)]
    assert len(SUBJECTS) == 12
    assert len(words) == len(set(words))
    assert not any(character.isdecimal() for word in words for character in word)
