"""Policy versions on engines: their names, what an engine samples with now, and which version sampled which tokens.

An adapter's name ends with its policy version, so the names that an engine has loaded tell anybody which
versions it serves.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

from clawstream.errors import TryLater
from clawstream.events import FinishReason, VersionSpan
from clawstream.inference.engines.engine import Finish, FinishKind
from clawstream.inference.engines.engine import WeightsSpan as EngineSpan

BASE_VERSION = 0
_BASE_NAMES = ("default", "base")  # what SGLang calls the weights that it was started with
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_VERSION = re.compile(r".+-v([0-9]{1,18})", re.ASCII | re.DOTALL)


def policy_version(name: str | None) -> int:
    """Return the version that an engine's weights are named after; the weights that it was started with are version 0.

    Raises TryLater for a name that is no version of ours.
    """
    if name is None or name in _BASE_NAMES:
        return BASE_VERSION
    if not _NUMBER.fullmatch(name):
        raise TryLater(
            f"the engine's weights are named {name[:100]!r}; expected a version number. Start it without a name"
        )
    return int(name)


def cache_key(policy_id: str, weights: int, tenant: str | None = None) -> str:
    """Return the key under which a tenant's requests to these weights share cached prompts."""
    return f"{policy_id}:{weights}" if tenant is None else f"{policy_id}:{weights}:{tenant}"


def adapter_name(policy_id: str, version: int) -> str:
    """Return the name under which engines serve this version of the policy."""
    return f"{policy_id}-v{version}"


def adapter_version(policy_id: str, name: str) -> int | None:
    """Return the version that the name stands for; None: it is no adapter of this policy."""
    found = _VERSION.fullmatch(name)
    version = None if found is None else int(found.group(1))
    return version if version is not None and name == adapter_name(policy_id, version) else None


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


class Served(NamedTuple):
    """The weights or adapter that answer a request for the newest version."""

    weights: int
    version: int
    adapter: str | None  # the one that has the version; None: the weights have it


class VersionedEngine(Protocol):
    """What is needed of an engine."""

    async def weight_version(self) -> str | None: ...
    async def lora_adapters(self) -> tuple[str, ...]: ...


async def served(engine: VersionedEngine, policy_id: str) -> Served:
    """Return what the engine serves now. Raises TryLater where it names nothing, or no version of ours."""
    weights = policy_version(await engine.weight_version())
    adapters = {adapter_version(policy_id, name): name for name in await engine.lora_adapters()}
    newest = max((version for version in adapters if version is not None), default=weights)
    return Served(weights, max(weights, newest), adapters[newest] if newest > weights else None)
