"""A held hint is let go once its person rejected enough answers in a row that followed it."""

from hypothesis import example, given
from hypothesis import strategies as st

from clawstream.events import FollowedHint, Retired, hint_id_of
from clawstream.training.batches.memory import CONTRADICTED_AFTER, TRIALS_A_SAMPLE, HintMemory
from tests.unit.training.test_memory import answered, step, taught, told


def followed(hint: str, *, accepted: bool) -> FollowedHint:
    """An answer that followed one of ann's hints."""
    return FollowedHint(hint_id=hint_id_of("policy", "ann", hint), gain_nats=2.0, accepted=accepted, sample_id="x")


@given(st.lists(st.booleans(), max_size=3 * CONTRADICTED_AFTER), st.integers(1, 4))
@example([False, True, False, False, False], 2)
def test_a_hint_is_retired_once_enough_answers_in_a_row_followed_it_and_were_rejected(
    answers: list[bool], at_once: int
) -> None:
    held = HintMemory()
    told(held, taught("a", "shorter", "ann"))
    in_a_row = 0
    for begin in range(0, len(answers), at_once):
        part = answers[begin : begin + at_once]
        held.note(step(followed=[followed("shorter", accepted=accepted) for accepted in part], version=2 + begin))
        for accepted in part:
            in_a_row = 0 if accepted else in_a_row + 1
        retired = [(one.hint_id, one.reason) for one in held.to_retire("policy", now_ms=5)]
        is_over = in_a_row >= CONTRADICTED_AFTER
        assert retired == [(hint_id_of("policy", "ann", "shorter"), Retired.CONTRADICTED)] * is_over


def test_a_hint_that_was_said_again_has_to_be_contradicted_again() -> None:
    held, rejected = HintMemory(), [followed("shorter", accepted=False)] * CONTRADICTED_AFTER
    said = told(held, taught("a", "shorter", "ann"))
    held.note(step(followed=rejected[1:], version=2))
    said += told(held, taught("b", "shorter", "ann"), version=4)
    held.note(step(followed=rejected[:1], version=5))
    assert held.to_retire("policy", now_ms=5) == []
    for version in (2, 3, 4):
        held.note(step(followed=rejected, version=version))
    assert held.to_retire("policy", now_ms=5) == []
    read = HintMemory()
    for event in said:
        read.learn(event)
    read.note(step(followed=rejected, version=3), asked_elsewhere=True)
    assert read.to_retire("policy", now_ms=5) == []
    read.note(step(followed=rejected, version=5), asked_elsewhere=True)
    assert len(read.to_retire("policy", now_ms=5)) == 1


def test_hints_are_tried_in_turn_and_sooner_the_more_answers_that_followed_them_were_rejected() -> None:
    held = HintMemory()
    told(held, *(taught(name, f"hint {name}", "ann") for name in "abcdef"), gain_nats=5.0)
    ids = {hint_id_of("policy", "ann", f"hint {name}"): name for name in "abcdefg"}

    def tried(num: int) -> str:
        return "".join(ids[trial.hint_id] for trial in held.to_try([answered(f"x{n}", 1) for n in range(num)]))

    assert len(tried(1)) == TRIALS_A_SAMPLE
    assert sorted(tried(2)) == ["c", "d", "e", "f"]
    assert tried(1) == "ab"
    told(held, taught("g", "hint g", "ann"), version=2, gain_nats=5.0)
    assert tried(4) == "gcdefabg"  # a new one comes first, and then in its turn
    held.note(step(followed=[followed("hint d", accepted=False)]))
    assert tried(1) == "dc"
