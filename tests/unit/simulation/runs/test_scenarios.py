"""Who talks in a scenario, and what about."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from clawstream.simulation import marks, reactions
from clawstream.simulation.policy.lessons import WANTED, Conflict
from clawstream.simulation.policy.recipe import RECIPES
from clawstream.simulation.problems import SUBJECTS, Sum, SumSet
from clawstream.simulation.runs.scenarios import SCENARIOS, SCORED_FLIPPED, UnusableProblems, blocks_of, write


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sums(path: Path) -> list[Sum]:
    asked = [row["question"].split() for row in rows(path) if "subject" not in row]
    return [Sum(left=int(left), right=int(right)) for left, _, right in asked]


@pytest.mark.parametrize("name", SCENARIOS)
def test_people_and_scorer_read_only_sums_of_their_own_group(name: str, tmp_path: Path) -> None:
    asked, scored = write(SCENARIOS[name], tmp_path / "new")

    assert {s.group for s in sums(asked)} == {SumSet.STUDENTS}
    assert {s.group for s in sums(scored)} == {SumSet.SCORED}
    assert sum(task.subject is None for task in reactions.tasks(asked.read_text())) == len(set(sums(asked)))
    assert len(marks.questions(scored.read_text())) == len(set(sums(scored))) == SCENARIOS[name].num_scored


def test_in_one_stream_each_person_asks_about_a_third_and_500_problems_are_scored(tmp_path: Path) -> None:
    asked, scored = write(SCENARIOS["all"], tmp_path)

    for path in (asked, scored):
        shares = Counter(row["persona"] for row in rows(path))
        assert set(shares) == {"student", "teacher", "ta"}
        assert min(shares.values()) > 0.28 * shares.total()
    assert len(rows(scored)) == 500


def test_blocks_are_of_the_people_and_problems_of_one_stream(tmp_path: Path) -> None:
    one_stream, blocks = (write(SCENARIOS[name], tmp_path / name) for name in ("all", "blocks"))

    assert [path.read_bytes() for path in one_stream] == [path.read_bytes() for path in blocks]


def test_a_student_who_speaks_of_something_else_is_asked_for_no_score_of_it(tmp_path: Path) -> None:
    asked, scored = write(SCENARIOS["unrelated"], tmp_path / "unrelated")
    of_student, scored_of_student = write(SCENARIOS["student"], tmp_path / "student")

    tasks = reactions.tasks(asked.read_text())
    assert {task.persona for task in tasks} == {"student"}
    assert {task.subject for task in tasks} == {None, *SUBJECTS}
    assert [row for row in rows(asked) if "subject" not in row] == rows(of_student)
    assert sums(scored) == sums(scored_of_student)
    wordings = {row["prompt"].replace(row["question"], "{question}") for row in rows(scored)}
    assert wordings == {*reactions.MANNERS["student"].questions}


def test_blocks_share_the_updates_and_nobody_has_one_where_all_talk_at_once() -> None:
    def ends(scenario: str, updates: int) -> list[int]:
        return [block.end for block in blocks_of(scenario, updates)]

    assert ends("blocks", 30) == [10, 20, 30]
    assert ends("blocks", 3) == [1, 2, 3]
    assert ends("unrelated", 20) == [16, 20]
    assert ends("unrelated", 5) == [1, 5]
    assert [ends(name, 16) for name in ("all", "student", "tools")] == [[], [], []]


def test_a_scored_question_is_in_a_wording_of_who_asks_and_brings_their_hint(tmp_path: Path) -> None:
    scenario = SCENARIOS["all"]
    _, scored = write(scenario, tmp_path)
    hints = {persona.name: persona.hint for persona in scenario.personas}

    used = {(row["persona"], row["prompt"].replace(row["question"], "{question}")) for row in rows(scored)}

    assert used == {(name, wording) for name, manner in reactions.MANNERS.items() for wording in manner.questions}
    assert all(row["hint"] == hints[row["persona"]] for row in rows(scored))


def test_after_a_flip_each_wants_what_the_one_before_them_wanted_in_what_is_asked_and_scored_alike(
    tmp_path: Path,
) -> None:
    scenario = SCENARIOS["all"]
    asked, scored = write(scenario, tmp_path)
    flipped = {"student": "ta", "teacher": "student", "ta": "teacher"}
    hints = {persona.name: persona.hint for persona in scenario.personas}

    assert {(row["persona"], row["flipped"]) for row in rows(asked)} == {*flipped.items()}
    assert rows(tmp_path / SCORED_FLIPPED) == [
        row | {"wants": flipped[row["persona"]], "hint": hints[flipped[row["persona"]]]} for row in rows(scored)
    ]
    assert [q.wish for q in marks.questions(scored.read_text())] == [row["persona"] for row in rows(scored)]


def test_what_is_wanted_after_a_flip_is_what_base_policies_write_least() -> None:
    for name in ("standard", "standard_2", "standard_3", "hard"):
        mix = RECIPES[name].mix
        assert isinstance(mix, Conflict)
        assert 1 - mix.own - mix.next_one < mix.next_one  # the share of the one before, and of the one after
    styles = dict(zip((p.name for p in SCENARIOS["all"].personas), WANTED, strict=True))
    for who in SCENARIOS["all"].personas:
        ours, theirs = styles[who.name], styles[SCENARIOS["all"].flipped(who).name]
        assert (WANTED.index(theirs) - WANTED.index(ours)) % 3 == 2


def test_the_demos_scenario_is_one_student_scored_in_one_wording(tmp_path: Path) -> None:
    _, scored = write(SCENARIOS["student"], tmp_path)

    assert {row["prompt"] for row in rows(scored)} == {f"What is {row['question']}?" for row in rows(scored)}


def test_a_base_that_was_built_before_is_the_same_policy_still() -> None:
    assert {name: recipe.digest() for name, recipe in RECIPES.items()} == {
        "demo": "f20150d9b94ef786", "standard": "caca7f673e6ceb76", "standard_2": "d6dd837e33c8cc39",
        "standard_3": "b55625b631925e93", "hard": "fb62b8d260380d97", "tools": "7d90856622f0f66f",
    }  # fmt: skip


def test_real_problems_are_split_between_people_and_scorer(tmp_path: Path) -> None:
    problems = [{"question": f"How much is {n} euros and {n} more?", "ground_truth_answer": 2 * n} for n in range(40)]
    file = tmp_path / "real.json"
    file.write_text(json.dumps(problems))

    asked, scored = write(SCENARIOS["all"], tmp_path, problems=file)

    mine, theirs = ({row["question"] for row in rows(path)} for path in (asked, scored))
    assert mine | theirs == {problem["question"] for problem in problems}
    assert not mine & theirs
    assert len(theirs) == 20
    assert {row["persona"] for row in rows(asked)} == {"student", "teacher", "ta"}
    assert all(row["question"] in row["prompt"] and row["answer"].isdecimal() for row in rows(scored))
    assert all(question.answer for question in marks.questions(scored.read_text()))


def test_a_question_that_stands_twice_is_asked_or_scored_once(tmp_path: Path) -> None:
    problems = [{"question": f"{n}?", "ground_truth_answer": f"{n},000"} for n in range(1, 5)]
    file = tmp_path / "real.json"
    file.write_text(json.dumps([*problems, {"question": "1?", "ground_truth_answer": 1000}]))

    asked, scored = write(SCENARIOS["all"], tmp_path, problems=file)

    assert sorted(row["question"] for path in (asked, scored) for row in rows(path)) == ["1?", "2?", "3?", "4?"]
    assert {row["answer"] for row in rows(asked)} <= {"1000", "2000", "3000", "4000"}


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"question": "1?", "ground_truth_answer": 3}, r"real\.json\[1\]: '1\?' has the answer 3, and 2 before"),
        ({"question": "2?", "ground_truth_answer": "1/2"}, r"real\.json\[1\]: ground_truth_answer is '1/2', expected"),
        ({"question": "2?", "ground_truth_answer": -4}, r"real\.json\[1\]: ground_truth_answer is '-4', expected"),
    ],
)
def test_an_answer_that_can_not_be_marked_is_named_and_nothing_is_written(
    second: dict[str, object], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "real.json"
    file.write_text(json.dumps([{"question": "1?", "ground_truth_answer": 2}, second]))

    with pytest.raises(UnusableProblems, match=words):
        write(SCENARIOS["all"], tmp_path / "new", problems=file)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '[{"question": "?"}]', '[{"question": "1", "ground_truth_answer": 2}]']
)
def test_a_file_that_holds_no_problems_is_named_and_nothing_is_written(text: str, tmp_path: Path) -> None:
    file = tmp_path / "real.json"
    file.write_text(text)

    with pytest.raises(UnusableProblems, match=r"real\.json: .*Nothing was written"):
        write(SCENARIOS["all"], tmp_path / "new", problems=file)
    assert not (tmp_path / "new").exists()
