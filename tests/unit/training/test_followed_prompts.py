"""A held hint is rehearsed on prompts that nobody said it of, too: on those whose answers followed it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import FollowedHint, HintHeld, HintRetired, Retired, SampleAssembled, hint_id_of
from clawstream.training.batches.memory import PROMPTS_A_HINT, HintMemory, common, merged_into
from tests.unit.training.test_memory import answered, step, taught, told, turns

SHORTER = hint_id_of("policy", None, "shorter")


def followed(sample: SampleAssembled, *, accepted: bool = True, hint_id: str = SHORTER) -> FollowedHint:
    return FollowedHint(hint_id=hint_id, gain_nats=2.0, accepted=accepted, sample_id=sample.sample_id)


def extended(
    held: HintMemory, samples: Sequence[SampleAssembled], *, hint_id: str = SHORTER, version: int = 2
) -> list[HintHeld]:
    """What the memory writes after a step on each of these, whose answers followed the hint; it has learned it then."""
    written = []
    for sample in samples:
        found = step(followed=[followed(sample, hint_id=hint_id)], version=version)
        for event in held.to_extend(found, [sample], now_ms=version):
            held.learn(event)
            written.append(event)
    return written


def test_a_prompt_whose_answer_followed_a_hint_and_was_accepted_is_rehearsed_with_that_hint() -> None:
    held, sample = HintMemory(), answered("b", 1, key_name=None)
    told(held, taught("a"))
    [event] = extended(held, [sample])
    assert (event.followed, event.hint, event.hint_id, event.turn_id) == (True, "shorter", SHORTER, "b")
    assert (event.prompt_ids, event.hinted_prompt_ids) == ((7, 2), (7, 3, 2))
    assert [*held.to_ask(1, version=2, now_ms=9), *held.to_ask(1, version=3, now_ms=9)][1].turn_id == "b"
    assert held.to_extend(step(followed=[followed(sample)]), [sample], now_ms=9) == []  # the step is read again


@pytest.mark.parametrize(
    ("found", "sample"),
    [
        (followed(answered("b", 1, key_name=None), accepted=False), answered("b", 1, key_name=None)),
        (followed(answered("b", 1, key_name=None), hint_id="retired"), answered("b", 1, key_name=None)),
        (followed(answered("c", 1, key_name=None)), answered("b", 1, key_name=None)),
        (followed(answered("b", 1, key_name=None)), replace(answered("b", 1, key_name=None), prompt_ids=(7, 9))),
    ],
    ids=["it was rejected", "the hint is held no more", "the sample is missing", "no place for the hint"],
)
def test_no_prompt_is_added_where(found: FollowedHint, sample: SampleAssembled) -> None:
    held = HintMemory()
    told(held, taught("a"))
    assert held.to_extend(step(followed=[found]), [sample], now_ms=2) == []


def test_answers_to_somebody_known_are_tried_however_many_prompts_a_hint_has() -> None:
    held = HintMemory()
    [said] = told(held, taught("a", "shorter", "ann"), gain_nats=5.0)
    extended(held, [answered(f"{n}", 1) for n in range(PROMPTS_A_HINT)], hint_id=said.hint_id)
    assert [trial.accepted for trial in held.to_try([answered("b", -1)])] == [False]


def test_prompts_where_a_hint_was_followed_are_rehearsed_however_many_others_follow() -> None:
    held = HintMemory()
    told(held, taught("a"))
    asked = []
    for n in range(4 * PROMPTS_A_HINT):
        extended(held, [answered(f"followed {n}", 1, key_name=None)])
        asked += turns(held.to_ask(1, version=n, now_ms=0))
    assert {*asked} == {"a", *(f"followed {n}" for n in range(PROMPTS_A_HINT))}


def test_a_step_adds_one_prompt_to_a_hint() -> None:
    held = HintMemory()
    told(held, taught("a"))
    samples = [answered(name, 1, key_name=None) for name in "bc"]
    events = held.to_extend(step(followed=list(map(followed, samples))), samples, now_ms=2)
    assert [event.turn_id for event in events] == ["b"]


def test_the_hint_of_an_added_prompt_is_the_one_that_was_followed_whoever_asked() -> None:
    held = HintMemory()
    [said] = told(held, taught("a", "shorter", "ann"))
    [event] = extended(held, [answered("b", 1, key_name=None)], hint_id=said.hint_id)
    assert (event.hint_id, event.key_name) == (said.hint_id, "ann")


@given(st.integers(0, 3 * PROMPTS_A_HINT), st.integers(0, 2 * PROMPTS_A_HINT))
def test_prompts_that_a_hint_was_said_of_and_others_are_bounded_apart(num_said: int, num_followed: int) -> None:
    held = HintMemory()
    said = [f"said {n}" for n in range(num_said + 1)]
    for n, name in enumerate(said):
        told(held, taught(name), version=n)
    others = [answered(f"followed {n}", 1, key_name=None) for n in range(num_followed)]
    assert len(extended(held, others)) == min(num_followed, PROMPTS_A_HINT)
    asked = {*turns(held.to_ask(99, version=99, now_ms=0))}
    kept = {*said[-PROMPTS_A_HINT:], *(one.turn_id for one in others[:PROMPTS_A_HINT])}
    assert asked == kept
    assert [one.num_prompts for one in held.held] == [len(kept)]


def test_a_fold_of_the_log_knows_the_added_prompts_and_they_end_with_their_hint() -> None:
    held, again = HintMemory(), HintMemory()
    said, added = told(held, taught("a")), extended(held, [answered("b", 1, key_name=None)])
    for event in [*said, *added]:
        again.learn(event)
    assert again.held == held.held
    again.learn(HintRetired(policy_id="policy", hint_id=SHORTER, reason=Retired.ASKED, retired_at_ms=3))
    for late in added:
        again.learn(replace(late, sample_id="late"))
    assert again.held == ()


def test_a_hint_that_is_merged_brings_the_prompts_where_it_was_followed() -> None:
    held, shared = HintMemory(), HintMemory()
    told(held, taught("a"))
    extended(held, [answered("b", 1, key_name=None)])
    [prompts] = common([held], "policy", at_least=1)
    for prompt in prompts:
        shared.learn(merged_into(prompt, 3, 9))
    assert {*turns(shared.to_ask(9, version=3, now_ms=9))} == {"a", "b"}


def test_of_a_hint_that_is_merged_the_prompts_that_it_was_said_of_come_first() -> None:
    held = HintMemory()
    told(held, *(taught(f"said {n}") for n in range(PROMPTS_A_HINT)))
    extended(held, [answered("followed", 1, key_name=None)], version=9)
    [prompts] = common([held], "policy", at_least=1)
    assert {one.turn_id for one in prompts} == {f"said {n}" for n in range(PROMPTS_A_HINT)}
