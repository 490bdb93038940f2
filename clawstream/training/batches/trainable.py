"""What a sample has to be for a step to be taken on it. Pure.

The one rule: no sample may break a step, since its plan is on the log by then and every restart would meet it again. So
any sample that the model or the loss would break on is found here, before a plan names it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from clawstream.events import SampleAssembled


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits of the policy's model; None: its configuration does not say."""

    vocabulary_tokens: int | None = None
    context_tokens: int | None = None


def flaw(sample: SampleAssembled, limits: ModelLimits) -> str | None:
    """Return why no step can be taken on the sample, in words for a person; None: one can."""
    return _misaligned(sample) or _outside(sample, limits) or _not_a_number(sample)


def hint_counts(sample: SampleAssembled, *, by_engine: bool) -> bool:
    """Return whether a sample's hint can be weighed; an engine's scores exist before the sample does, or never."""
    return sample.hinted_prompt_ids is not None and (not by_engine or sample.teacher_logprobs is not None)


def _misaligned(sample: SampleAssembled) -> str | None:
    if not sample.prompt_ids or sample.hinted_prompt_ids == ():
        return "a prompt without a token: expected at least one"
    num_tokens = len(sample.response_ids)
    if not num_tokens:
        return "response_ids is empty: expected at least one token"
    rows: dict[str, Sequence[float | None] | None] = {
        "response_logprobs": sample.response_logprobs,
        "trained": sample.trained,
        "teacher_logprobs": sample.teacher_logprobs,
        "student_logprobs": sample.student_logprobs,
    }
    if (sample.teacher_logprobs is None) != (sample.student_logprobs is None):
        return "it has the log-probs of a teacher or of a student: expected both or neither, to hold against each other"
    for name, values in rows.items():
        if values is not None and len(values) != num_tokens:
            return f"{name} has {len(values)} values: expected {num_tokens}, one per token of the response"
    if not set(sample.trained) <= {0, 1}:
        return f"trained has a {max(sample.trained, key=abs)}: expected 0 or 1"
    return None


def _outside(sample: SampleAssembled, limits: ModelLimits) -> str | None:
    parts: dict[str, Sequence[int]] = {
        "prompt_ids": sample.prompt_ids,
        "hinted_prompt_ids": sample.hinted_prompt_ids or (),
        "response_ids": sample.response_ids,
    }
    size, context = limits.vocabulary_tokens, limits.context_tokens
    for name, ids in parts.items():
        if ids and (min(ids) < 0 or (size is not None and max(ids) >= size)):
            strange = min(ids) if min(ids) < 0 else max(ids)
            return f"{name} has the id {strange}: expected ids from 0 to {'?' if size is None else size - 1}"
    longest = max(len(sample.prompt_ids), len(sample.hinted_prompt_ids or ())) + len(sample.response_ids)
    if context is not None and longest > context:
        return f"prompt and response have {longest} tokens: expected at most {context}, the model's context"
    return None


def _not_a_number(sample: SampleAssembled) -> str | None:
    if sample.reward not in (None, -1, 1):
        return f"the judge's part of the reward is {sample.reward}: expected -1, 1 or none"
    if sample.total_reward is not None and not abs(sample.total_reward) <= 1:
        return f"the reward is {sample.total_reward:g}: expected -1 to 1 or none"
    if not isfinite(sample.temperature) or sample.temperature < 0:
        return f"the temperature is {sample.temperature:g}: expected a finite number from 0 on"
    if any(span.policy_version < 0 for span in sample.versions):
        return "it was sampled by a version below 0: versions count from 0"
    return None
