"""Which version of the policy sampled which tokens, and how an answer ended, as an engine tells it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from clawstream.errors import TryLater
from clawstream.events import FinishReason, VersionSpan
from clawstream.inference.engines.adapters import policy_version
from clawstream.inference.engines.engine import Finish, FinishKind
from clawstream.inference.engines.engine import WeightsSpan as EngineSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """Which version sampled which tokens, and how likely each was under it; None where no published version did."""

    versions: tuple[VersionSpan, ...]
    logprobs_nats: Sequence[float | None]


def behaviour(
    engine_spans: Sequence[EngineSpan], logprobs_nats: Sequence[float | None], adapter_version: int | None = None
) -> Behaviour:
    """Return which versions sampled the tokens; an engine names the weights even under an adapter.

    Where those weights change below an adapter, the tokens from there on belong to no version: they bear the name of
    the new weights, and no log-probs. Raises TryLater where the engine's spans don't cover the tokens, or go back to
    older weights: a rollback has a number of its own.
    """
    spans = [span for span in engine_spans if span.num_tokens]
    if sum(span.num_tokens for span in spans) != len(logprobs_nats):
        raise TryLater(
            f"the engine named the weights of {sum(span.num_tokens for span in spans)} of {len(logprobs_nats)} "
            "sampled tokens; the answer is not recorded. Use an engine that reports weight_versions"
        )
    versions = tuple(
        VersionSpan(policy_version=policy_version(span.version), num_tokens=span.num_tokens) for span in spans
    )
    older = next((two for two in pairwise(versions) if two[0].policy_version > two[1].policy_version), None)
    if older is not None:
        raise TryLater(
            f"the engine went from version {older[0].policy_version} back to {older[1].policy_version} within an "
            "answer; the answer is not recorded"
        )
    if adapter_version is None or not versions:
        return Behaviour(versions=versions, logprobs_nats=logprobs_nats)
    pinned, *rest = versions
    lost = [None] * sum(span.num_tokens for span in rest)
    return Behaviour(
        versions=(replace(pinned, policy_version=adapter_version), *rest),
        logprobs_nats=[*logprobs_nats[: pinned.num_tokens], *lost],
    )


def finish_reason(finish: Finish, tool_calls: Sequence[object]) -> FinishReason:
    """Return why an answer ended, in OpenAI's words; an aborted one has no such reason and does not come here."""
    if finish.kind is FinishKind.LENGTH:
        return FinishReason.LENGTH
    return FinishReason.TOOL_CALLS if tool_calls else FinishReason.STOP
