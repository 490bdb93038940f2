"""A short hint memory: one hint on two prompts, a person's on one, and what steps say of them."""

from collections.abc import Sequence

from clawstream.events import HintHeld, KeptHint, Rehearsed, Sampling, StepTaken, hint_id_of

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=None, max_tokens=9, seed=None, stop=())


def said_hint(key_name: str | None, hint: str) -> str:
    return hint_id_of("policy", key_name, hint)


def held(turn_id: str, hint: str, key_name: str | None, *, by_person: bool = False) -> HintHeld:
    return HintHeld(
        policy_id="policy",
        hint_id=said_hint(key_name, hint),
        hint=hint,
        hint_by_person=by_person,
        key_name=key_name,
        session_id=f"session {turn_id}",
        turn_id=turn_id,
        sample_id=f"sample {turn_id}",
        prompt_ids=(1, 2),
        hinted_prompt_ids=(1, 3, 2),
        sampling=SAMPLING,
        num_earlier_turns=0,
        policy_version=1,
        held_at_ms=1_700_000_000_000,
    )


HELD = (
    held("a", "be brief", "ann"),
    held("b", "Be brief", "ann"),
    held("c", "Show the steps", None, by_person=True),
)


def step(version: int, *rehearsed: Rehearsed, kept: Sequence[KeptHint] = ()) -> StepTaken:
    return StepTaken(
        policy_id="policy", policy_version=version, num_samples=1, num_hinted=1, num_rewarded=0, num_tokens=2,
        num_tokens_dropped=0, loss_nats=0.5, kl_reference_nats=None, mean_gap_nats=None, mean_reward=None,
        clipped_share=None, grad_norm=None, learning_rate=1e-3, mean_versions_behind=0.0, max_versions_behind=0,
        step_ms=1, taken_at_ms=1, rehearsed=rehearsed, kept=tuple(kept),
    )  # fmt: skip
