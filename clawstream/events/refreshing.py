"""Answers given anew: the policy of today answers a prompt of the past, and nobody sees it but the trainer."""

from dataclasses import dataclass
from typing import ClassVar

from clawstream.events.base import LogProbs, SessionEvent, TokenIds
from clawstream.events.exchanges import FinishReason, Sampling, VersionSpan

FOR_A_LATE_SAMPLE = 0  # the number of the answer given where a sample came too late; further answers count from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshAsked(SessionEvent):
    """A sample of the turn came too late to be trained on: its prompt is to be answered anew, once.

    It holds what an engine needs: by now nobody may know the turn any more.
    """

    IDENTITY: ClassVar = ("turn_id",)

    turn_id: str
    sample_id: str  # the first that came too late
    policy_id: str
    prompt_ids: TokenIds
    sampling: Sampling
    asked_at_ms: int  # when the broker appended that sample, since the epoch, UTC


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRefreshed(SessionEvent):
    """What the policy answered to the prompt of exchange `turn_id`, or why it did not: once for each number.

    Whose hint scores it is not said: all of the turn's do.
    """

    IDENTITY: ClassVar = ("turn_id", "number")

    turn_id: str
    number: int  # 0: a sample came too late; 1 and on: a further answer for the turn's hints
    policy_id: str
    sampling: Sampling
    versions: tuple[VersionSpan, ...]  # in output order; their num_tokens sum to len(output_ids)
    message: bytes | None  # as JSON; None: there is no answer
    output_ids: TokenIds  # as sampled, the stop token included
    output_logprobs: LogProbs  # one per output id, at the sampling temperature
    finish_reason: FinishReason | None  # None exactly when `message` is
    error: str | None  # why there is none
    answered_at_ms: int  # since the epoch, UTC
