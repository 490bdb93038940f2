"""Samples: all that a trainer needs of one turn, or the reason why there is none."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from clawstream.events.base import LogProbs, Mask, SessionEvent, TokenIds
from clawstream.events.exchanges import Sampling, VersionSpan


class RefusalReason(StrEnum):
    """Why a turn, or a whole session, gives no sample."""

    NO_SIGNAL = "no_signal"  # neither a hint nor a verdict of -1 or 1
    NO_NEXT_STATE = "no_next_state"  # the session ended and no turn of it was paired
    FLOOR_UNDECIDED = "floor_undecided"  # the floor's second look gave no -1 or 1 either
    EMPTY_ANSWER = "empty_answer"
    TRUNCATED = "truncated"  # the answer ran into max_tokens
    LOOPING = "looping"  # the answer ends in the same tokens over and over
    MISALIGNED = "misaligned"  # token ids and log-probs differ in number, or every log-prob is missing
    OFF_DISTRIBUTION = "off_distribution"  # sampled greedily or from the likeliest tokens alone
    PROMPT_UNKNOWN = "prompt_unknown"  # an exchange that the prompt refers to is not known any more
    HINT_UNRENDERABLE = "hint_unrenderable"  # the hinted prompt can't be rendered or is too long


class OffDistribution(StrEnum):
    """What becomes of an answer whose tokens were not drawn with the probabilities on record."""

    REFUSE = "refuse"
    HINT_ONLY = "hint_only"  # a sample without its reward
    GATEWAY_OVERRIDE = "gateway_override"  # refused; the gateway lets none come about


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAssembled(SessionEvent):
    """One trainable turn: tokens exactly as sampled, and the reward, the hinted prompt, or both.

    The model is trained on `response_ids` after `prompt_ids`; its teacher is the model that sees `hinted_prompt_ids`
    instead. `sample_id` is the event's id.
    """

    IDENTITY: ClassVar = ("turn_id", "judge", "prompt_version", "revision")

    turn_id: str
    judge: str
    prompt_version: str
    revision: int
    reward: int | None  # -1 or 1; None: no verdict says either
    hint: str | None
    prompt_ids: TokenIds
    hinted_prompt_ids: TokenIds | None  # None exactly when `hint` is
    response_ids: TokenIds
    response_logprobs: LogProbs  # of the behaviour policy, at `temperature`
    trained: Mask  # one per response id
    temperature: float
    sampling: Sampling | None  # as the exchange says it; None: a sample of a version that did not say
    policy_id: str
    versions: tuple[VersionSpan, ...]
    num_earlier_turns: int  # main turns of the session before this one; 0: its first answer

    @property
    def sample_id(self) -> str:
        """The id under which batches name this sample."""
        return self.event_id


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRefused(SessionEvent):
    """No sample comes of this turn, or of this session where `turn_id` is None."""

    IDENTITY: ClassVar = ("session_id", "turn_id", "judge", "prompt_version", "revision")

    turn_id: str | None
    judge: str | None  # None: no judge was asked, as no turn was paired
    prompt_version: str | None
    revision: int
    reason: RefusalReason
