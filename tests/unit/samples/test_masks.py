"""Answers that end in a loop are seen as such, and no others."""

from hypothesis import given
from hypothesis import strategies as st

from clawstream.conversation.floor import mask
from clawstream.conversation.messages import LONGEST_CYCLE_TOKENS, LOOP_TIMES, LOOP_TOKENS, loops
from clawstream.events import FinishReason, RefusalReason
from tests.sessions import Session, user

TOKENS = st.lists(st.integers(0, 20), min_size=1, max_size=200)
CYCLES = st.lists(st.integers(0, 5), min_size=1, max_size=LONGEST_CYCLE_TOKENS)


@given(TOKENS, CYCLES, st.integers(0, 63))
def test_an_answer_whose_second_half_is_one_cycle_over_and_over_loops(
    before: list[int], cycle: list[int], cut: int
) -> None:
    """Wherever in the cycle it was cut off."""
    needed = max(LOOP_TOKENS, LOOP_TIMES * len(cycle), len(before))
    times = -(-needed // len(cycle)) + 1
    looped = before + (cycle * times)[: len(cycle) * times - cut % len(cycle)]
    assert loops(looped)


@given(TOKENS, CYCLES, st.lists(st.integers(30, 40), min_size=1, max_size=30, unique=True))
def test_what_goes_on_to_anything_else_does_not_loop(before: list[int], cycle: list[int], after: list[int]) -> None:
    assert not loops(before + cycle * 50 + after)


@given(st.integers(1, LONGEST_CYCLE_TOKENS), st.integers(1, 3))
def test_less_than_four_times_is_no_loop(size: int, times: int) -> None:
    assert not loops([*range(100, 300), *(list(range(size)) * times)])


def test_a_few_repeated_tokens_at_the_end_of_a_long_answer_are_no_loop() -> None:
    answer = list(range(1000))
    assert not loops(answer + [7] * 500)
    assert loops(answer + [7] * 1001)


@given(st.integers(1, LOOP_TOKENS - 1))
def test_a_short_answer_does_not_loop(size: int) -> None:
    assert not loops([5] * size)
    assert loops([5] * LOOP_TOKENS)


def test_a_loop_is_refused_by_its_name_and_a_truncated_one_by_that() -> None:
    looped = "ab" * LOOP_TOKENS
    said = Session("s").ask([user("go on")], looped)
    assert mask(said) is RefusalReason.LOOPING
    cut = Session("s").ask([user("go on")], looped, finish_reason=FinishReason.LENGTH)
    assert mask(cut) is RefusalReason.TRUNCATED
