"""Gathers what the engine sampled into the event that records the exchange. Pure.

The event does not depend on how the engine cut its answer into chunks. It holds the engine's own numbers: ids and
log-probs as sampled, and the version of the weights that sampled each token.
"""

from dataclasses import dataclass, field
from typing import Any

from clawstream.events import (
    ExchangeCompleted,
    ExchangeFailed,
    FailureReason,
    FinishReason,
    RequestDelta,
    Sampling,
    TurnType,
    VersionSpan,
    float32,
)
from clawstream.gateway.requests.fields import to_json
from clawstream.gateway.requests.profiles import Grouped
from clawstream.inference.engine import Behaviour, Chunk, Finish, behaviour
from clawstream.inference.engine import WeightsSpan as EngineSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What is known of an exchange before its answer begins."""

    exchange_id: str
    session_id: str
    turn_type: TurnType
    client: str
    key_name: str | None
    model: str
    request_sha256: str
    retry_count: int | None
    group: Grouped | None
    num_spliced: int
    sampling: Sampling
    policy_id: str
    trace_id: str | None
    received_at_ms: int
    choice_of: str | None = None  # the first exchange of a request with several answers


@dataclass(slots=True, kw_only=True)
class Capture:
    """An answer as it grows; each of the engine's chunks goes to `add`."""

    token_ids: list[int] = field(default_factory=list)
    logprobs_nats: list[float | None] = field(default_factory=list)
    spans: tuple[EngineSpan, ...] = ()
    cached_tokens: int | None = None
    finish: Finish | None = None
    first_token_at_ms: int | None = None
    num_sent_tokens: int = 0  # tokens whose text the client was sent
    named: set[str | None] = field(default_factory=set)  # the weights that the chunks with tokens name

    def add(self, chunk: Chunk, now_ms: int) -> None:
        """Take in what the engine sampled by `now_ms`."""
        if chunk.token_ids:
            self.named.add(chunk.weight_version)
            if self.first_token_at_ms is None:
                self.first_token_at_ms = now_ms
        self.token_ids += chunk.token_ids
        self.logprobs_nats += chunk.logprobs_nats
        if chunk.cached_tokens is not None:
            self.cached_tokens = chunk.cached_tokens
        if chunk.finish is not None:
            self.finish, self.spans = chunk.finish, chunk.weight_versions

    def behaviour(self, adapter_version: int | None = None) -> Behaviour:
        """Return which versions sampled the tokens. Raises TryLater where the engine's spans don't cover them."""
        return behaviour(self.spans, self.logprobs_nats, adapter_version)

    def completed(
        self,
        accepted: Accepted,
        request: RequestDelta,
        message: dict[str, Any],
        finish_reason: FinishReason,
        behaviour: Behaviour,
        now_ms: int,
    ) -> ExchangeCompleted:
        """Return the event of an answer that was generated to its end."""
        group = accepted.group
        return ExchangeCompleted(
            session_id=accepted.session_id,
            exchange_id=accepted.exchange_id,
            turn_type=accepted.turn_type,
            client=accepted.client,
            key_name=accepted.key_name,
            model=accepted.model,
            request=request,
            request_sha256=accepted.request_sha256,
            retry_count=accepted.retry_count,
            sampling=accepted.sampling,
            policy_id=accepted.policy_id,
            versions=behaviour.versions,
            message=to_json(message),
            output_ids=tuple(self.token_ids),
            output_logprobs=float32(behaviour.logprobs_nats),
            finish_reason=finish_reason,
            cached_tokens=self.cached_tokens,
            num_spliced=accepted.num_spliced,
            trace_id=accepted.trace_id,
            received_at_ms=accepted.received_at_ms,
            first_token_at_ms=self.first_token_at_ms,
            finished_at_ms=now_ms,
            group_id=None if group is None else group.group_id,
            group_size=None if group is None else group.size,
            step_index=None if group is None else group.step_index,
            choice_of=accepted.choice_of,
        )

    def failed(
        self,
        accepted: Accepted,
        request: RequestDelta,
        reason: FailureReason,
        detail: str,
        now_ms: int,
        *,
        status: int | None = None,
        message: dict[str, Any] | None = None,
        version: int | None = None,
    ) -> ExchangeFailed:
        """Return the event of an answer that the client did not get to its end.

        `message` is the part that the client got, if known; `version` sampled all of it, None where that is unknown.
        """
        sent = message is not None
        known = sent and version is not None
        spans = (VersionSpan(policy_version=version or 0, num_tokens=len(self.token_ids)),) if known else None
        return ExchangeFailed(
            session_id=accepted.session_id,
            exchange_id=accepted.exchange_id,
            turn_type=accepted.turn_type,
            client=accepted.client,
            key_name=accepted.key_name,
            model=accepted.model,
            request=request,
            reason=reason,
            status=status,
            detail=detail,
            policy_id=accepted.policy_id,
            output_ids=tuple(self.token_ids),
            received_at_ms=accepted.received_at_ms,
            finished_at_ms=now_ms,
            message=None if message is None else to_json(message),
            num_sent_tokens=self.num_sent_tokens if sent else None,
            output_logprobs=float32(self.logprobs_nats) if sent else None,
            versions=spans,
            sampling=accepted.sampling if sent else None,
        )
