"""Refreshed answers: today's policy answers a recorded prompt again. Only the trainer uses such an answer."""

from dataclasses import dataclass
from typing import ClassVar

from clawstream.events.base import LogProbs, SessionEvent, TokenIds
from clawstream.events.exchanges import FinishReason, Sampling, VersionSpan

FOR_A_LATE_SAMPLE = 0  # the number of the answer that stands in for a late sample's; further ones count from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshAsked(SessionEvent):
    """A sample of the turn came too late to be trained on, so the turn's prompt is to be answered again, once.

    The event holds all that an engine needs, since every stage may have forgotten the turn by now.
    """

    IDENTITY: ClassVar = ("turn_id",)

    turn_id: str
    sample_id: str  # the first sample of the turn that came too late
    policy_id: str
    prompt_ids: TokenIds
    sampling: Sampling
    asked_at_ms: int  # when the broker appended that sample, since the epoch, UTC


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRefreshed(SessionEvent):
    """The policy's new answer to the prompt of exchange `turn_id`, or why there is none; one event for each number.

    The event names no hint: all hints of the turn score the answer.
    """

    IDENTITY: ClassVar = ("turn_id", "number")

    turn_id: str
    number: int  # 0: asked for since a sample came too late; 1, 2, ..: further answers for the turn's hints
    policy_id: str
    sampling: Sampling
    versions: tuple[VersionSpan, ...]  # in output order; their num_tokens sum to len(output_ids)
    message: bytes | None  # as JSON; None: there is no answer
    output_ids: TokenIds  # as sampled, the stop token included
    output_logprobs: LogProbs  # one per output id, at the sampling temperature
    finish_reason: FinishReason | None  # None exactly when `message` is
    error: str | None  # why there is no answer
    answered_at_ms: int  # since the epoch, UTC
