"""Who may see which sum."""

from itertools import product
from pathlib import Path

from clawstream.simulation import marks, problems, taste
from clawstream.simulation.problems import Group, Sum


def test_every_sum_belongs_to_exactly_one_group() -> None:
    numbers = range(problems.SMALLEST, problems.LARGEST + 1)
    everything = sorted(Sum(left=left, right=right) for left, right in product(numbers, numbers))

    assert sorted(s for group in Group for s in problems.all_of(group)) == everything


def test_a_sum_and_its_mirror_image_are_seen_by_the_same_people() -> None:
    numbers = range(problems.SMALLEST, problems.LARGEST + 1)

    assert all(Sum(left=a, right=b).group is Sum(left=b, right=a).group for a, b in product(numbers, numbers))


def test_two_hundred_held_out_sums_are_scored_and_they_cover_small_and_large() -> None:
    scored = problems.scored()

    assert len(set(scored)) == 200
    assert {s.group for s in scored} == {Group.SCORED}
    assert min(s.total for s in scored) < 60 < 160 < max(s.total for s in scored)


def test_the_files_say_to_students_and_scorer_just_their_own_sums(tmp_path: Path) -> None:
    students, scored = problems.write(tmp_path / "new")

    read_by_students = {(t.left, t.right) for t in taste.tasks(students.read_text())}
    read_by_scorer = {(q.left, q.right) for q in marks.questions(scored.read_text())}

    assert read_by_students == {(s.left, s.right) for s in problems.all_of(Group.STUDENTS)}
    assert read_by_scorer == {(s.left, s.right) for s in problems.scored()}
    assert not {tuple(sorted(s)) for s in read_by_students} & {tuple(sorted(s)) for s in read_by_scorer}
