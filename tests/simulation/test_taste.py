"""How the student reads an answer."""

import random

import pytest

from clawstream.simulation.taste import Impression, Task, ask, impression, react, tasks

TASK = Task(left=27, right=48)


@pytest.mark.parametrize(
    ("answer", "felt"),
    [
        ("7+8=15 and 20+40=60, so 75", Impression.GOOD),
        ("7 + 8 is 15, 20 + 40 is 60, so 75", Impression.GOOD),
        ("it's 75", Impression.STEPS_MISSING),
        ("7+8=15 and 20+40=60, so 76", Impression.WRONG),
        ("no idea", Impression.WRONG),
        ("## Answer\n75", Impression.STIFF),
        ("7+8=15 and 20+40=60, so **75**", Impression.STIFF),
        ("- 7+8=15\n- 20+40=60\n75", Impression.STIFF),
        ("1. 7+8=15\n2. 20+40=60\n76", Impression.STIFF),
    ],
)
def test_an_answer_strikes_by_its_look_then_its_number_then_its_steps(answer: str, felt: Impression) -> None:
    assert impression(TASK, answer) is felt


def test_the_same_random_source_asks_and_reacts_in_the_same_words() -> None:
    first, again = random.Random(7), random.Random(7)

    assert ask(TASK, first) == ask(TASK, again)
    assert react(Impression.STIFF, first) == react(Impression.STIFF, again)


def test_a_line_that_is_no_sum_is_named() -> None:
    with pytest.raises(ValueError, match="line 2 is '5 six'"):
        tasks("1 2\n5 six\n")
