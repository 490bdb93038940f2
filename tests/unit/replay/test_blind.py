"""Blind choices: what is shown tells nobody whose answer is whose, and what was chosen is counted for who said it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.cli.learning.real import UNRELATED
from clawstream.replay.comparing import Choice, Pair, PreferenceCounts, UnrelatedTask, tally
from tests.unit.replay.unrelated import RIGHT

PAIR = Pair(turn_id="t", request="?", before="old", after="new", after_first=False)


@given(st.booleans(), st.sampled_from(["a", "b"]))
def test_a_choice_is_for_whoever_said_what_was_chosen(after_first: bool, letter: str) -> None:
    pair = replace(PAIR, after_first=after_first)
    shown = dict(zip(("a", "b"), pair.shown, strict=True))
    assert pair.choice(letter) == (Choice.AFTER if shown[letter] == "new" else Choice.BEFORE)
    assert pair.choice("=") == Choice.EQUAL


@pytest.mark.parametrize(
    ("after", "before", "p"), [(5, 0, 0.0625), (0, 5, 0.0625), (8, 2, 0.109375), (3, 3, 1.0), (1, 0, 1.0)]
)
def test_how_likely_chance_is_to_be_as_clear_is_that_of_the_sign_test(after: int, before: int, p: float) -> None:
    assert PreferenceCounts(after=after, before=before, equal=9).chance == pytest.approx(p)


def test_no_choice_says_nothing_of_chance() -> None:
    assert PreferenceCounts(equal=3).chance is None


@given(st.lists(st.sampled_from(Choice)))
def test_every_choice_is_counted_once(choices: list[Choice]) -> None:
    told = tally(choices)
    assert (told.after, told.before, told.equal) == tuple(
        choices.count(one) for one in (Choice.AFTER, Choice.BEFORE, Choice.EQUAL)
    )


def test_unrelated_tasks_take_a_right_answer_and_no_other_task_s() -> None:
    tasks = [UnrelatedTask(**task) for task in json.loads(Path(UNRELATED).read_text())]
    assert len(tasks) == len(RIGHT)
    for number, task in enumerate(tasks):
        assert task.accepts(f"I think it is {RIGHT[number]}."), task.question
        assert not task.accepts("I don't know."), task.question
