"""By what a step is seen to do harm: bounds on intervals over answers, by hand."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.training.publishing import AnswerLikelihood, WrittenAnswer, astray, harm, misspoken


def seen(*logps: float, entropy: float = 1.0) -> AnswerLikelihood:
    return AnswerLikelihood(logps=logps, entropy_nats=entropy)


@given(st.lists(st.floats(-5, 0), min_size=3, max_size=12))
def test_a_policy_that_stayed_as_it_was_is_never_harmed(logps: Sequence[float]) -> None:
    there = [seen(logp, logp - 1) for logp in logps]
    assert harm(there, there, kl_nats=1e-6) is None
    assert astray(there, there, there, [(1.0, 1.0)] * len(there)) is None


@given(st.integers(3, 12), st.integers(0, 11))
def test_one_number_that_is_not_finite_is_enough(count: int, place: int) -> None:
    before = [seen(-1.0)] * count
    after = [seen(float("nan")) if i == place % count else seen(-1.0) for i in range(count)]
    assert "not finite" in (harm(before, after, kl_nats=1e9) or "")


def test_how_far_the_policy_moved_is_the_k3_estimate_with_its_interval() -> None:
    """exp(d) - 1 - d of d = -1 is 1 / e = 0.368, of each answer alike: the interval is a point."""
    before, after = [seen(-1.0)] * 4, [seen(-2.0)] * 4
    assert harm(before, after, kl_nats=0.37) is None
    assert "moved by 0.368 (0.368 to 0.368, 98 %) nats" in (harm(before, after, kl_nats=0.36) or "")


@pytest.mark.parametrize(
    ("entropy", "logp", "most"),
    [(0.2, -1.5, "0.1"), (0.42, -1.6, "0.14"), (0.6, -1.6, None), (4.0, -1.8, None), (4.0, -2.0, "0.3")],
)
def test_a_model_with_more_to_say_may_move_further_up_to_a_bound(entropy: float, logp: float, most: str | None) -> None:
    """By 0.107, 0.149, 0.149, 0.249 and 0.368 nats a token; a third of the entropy is allowed, from 0.1 to 0.3."""
    before, after = [seen(-1.0, entropy=entropy)] * 4, [seen(logp, entropy=3 * entropy)] * 4
    found = harm(before, after, kl_nats=0.1)
    assert (found is None) == (most is None)
    assert most is None or (found or "").endswith(f"expected at most {most}")


def test_two_answers_are_too_few_to_reject_by() -> None:
    assert harm([seen(-1.0)] * 2, [seen(-9.0)] * 2, kl_nats=0.1) is None


@pytest.mark.parametrize(("after", "what"), [(0.2, "surer"), (4.2, "less sure"), (0.3, None), (3.9, None)])
def test_an_entropy_changes_by_a_factor_of_four_at_most(after: float, what: str | None) -> None:
    found = harm([seen(-1.0)] * 4, [seen(-1.0, entropy=after)] * 4, kl_nats=1.0)
    assert (found is None) == (what is None)
    assert what is None or f"the policy is {what} by more" in (found or "")


def test_a_step_that_most_answers_contradict_leads_astray() -> None:
    before, good, bad = [seen(-1.0, -1.0)] * 4, [seen(-0.9, -0.9)] * 4, [seen(-1.1, -1.1)] * 4
    way = [(1.0, 1.0)] * 4
    assert astray(before, good, good, way) is None
    assert (astray(before, bad, good, way) or "").startswith("the step leads away")
    assert (astray(before, good, bad, way) or "").startswith("the gradient leads away")
    assert astray(before, [*good[:2], *bad[:2]], good, way) is None
    hardly = [seen(-1.005, -1.005)] * 4
    assert astray(before, hardly, hardly, way) is None, "a policy as people want it, which the leash alone leads"
    one_decides = [seen(-0.1, -0.1), *[seen(-1.01, -1.01)] * 11]
    assert astray([before[0]] * 12, one_decides, one_decides, [(1.0, 1.0)] * 12) is None


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (WrittenAnswer(token_ids=(), ended=True, answered_tokens=20), "are empty"),
        (WrittenAnswer(token_ids=(5,) * 128, ended=False, answered_tokens=200), "over and over"),
        (WrittenAnswer(token_ids=tuple(range(128)), ended=False, answered_tokens=20), "do not end"),
    ],
    ids=["empty", "looping", "endless"],
)
def test_most_answers_have_to_be_bad_for_the_policy_to_be(answer: WrittenAnswer, what: str) -> None:
    good = WrittenAnswer(token_ids=tuple(range(20)), ended=True, answered_tokens=20)
    assert what in (misspoken([answer] * 7 + [good]) or "")
    assert misspoken([answer] * 4 + [good] * 4) is None


def test_long_answers_and_those_of_a_model_without_an_end_are_not_endless() -> None:
    assert misspoken([WrittenAnswer(token_ids=tuple(range(128)), ended=False, answered_tokens=65)] * 8) is None
    assert misspoken([WrittenAnswer(token_ids=tuple(range(128)), ended=None, answered_tokens=20)] * 8) is None
