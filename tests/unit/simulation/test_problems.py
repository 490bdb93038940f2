"""Who may see which sum."""

from itertools import product

from clawstream.simulation import problems
from clawstream.simulation.problems import Sum, SumSet


def test_every_sum_belongs_to_exactly_one_group() -> None:
    numbers = range(problems.SMALLEST, problems.LARGEST + 1)
    everything = sorted(Sum(left=left, right=right) for left, right in product(numbers, numbers))

    assert sorted(s for group in SumSet for s in problems.all_of(group)) == everything


def test_a_sum_and_its_mirror_image_are_seen_by_the_same_people() -> None:
    numbers = range(problems.SMALLEST, problems.LARGEST + 1)

    assert all(Sum(left=a, right=b).group is Sum(left=b, right=a).group for a, b in product(numbers, numbers))


def test_five_hundred_held_out_sums_are_scored_and_they_cover_small_and_large() -> None:
    scored = problems.scored(500)

    assert len(set(scored)) == 500
    assert {s.group for s in scored} == {SumSet.SCORED}
    assert min(s.total for s in scored) < 60 < 160 < max(s.total for s in scored)
    assert set(problems.scored(200)) <= set(scored)
