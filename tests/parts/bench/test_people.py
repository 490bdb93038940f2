"""Who asks in the in-process sketch, and what its judge makes of another subject."""

from clawstream.simulation.problems import SUBJECTS, UNRELATED, SumSet, all_of
from clawstream.simulation.reactions import Impression
from tests.bench.people import People

PROBLEM = all_of(SumSet.STUDENTS)[0]


def test_who_talks_asks_alone() -> None:
    people = People(0, scenario="blocks", hint_share=0.5)
    assert {people._asked(PROBLEM).persona for _ in range(60)} == {"student", "teacher", "ta"}
    people.talk("ta")
    assert {people._asked(PROBLEM).persona for _ in range(60)} == {"ta"}


def test_another_subject_gives_a_hint_and_no_reward() -> None:
    people = People(0, scenario="unrelated")
    assert people._asked(PROBLEM).subject is None
    people.talk(UNRELATED)
    tasks = [people._asked(PROBLEM) for _ in range(200)]
    judged = [people._judged(task, Impression.OFF_STYLE) for task in tasks]

    assert {task.subject for task in tasks} == {*SUBJECTS}
    assert {reward for reward, _ in judged} == {0}
    hints = {hint for _, hint in judged} - {None}
    assert len(hints) == len(SUBJECTS)
    assert 0.9 < sum(hint is not None for _, hint in judged) / 200 <= 1
