"""The hint memory: the hints that a policy was trained on and is to go on following, and their rehearsals."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from clawstream.events.base import PolicyEvent, SessionEvent, TokenIds, derived_id
from clawstream.events.exchanges import Sampling
from clawstream.events.policy import asker_of


class Retired(StrEnum):
    """Why a hint is not rehearsed any more."""

    ASKED = "asked"  # a person said so
    CONTRADICTED = "contradicted"  # its person rejected answers that followed it, several in a row
    CROWDED_OUT = "crowded_out"  # the memory was full, and of all its hints this one was said longest ago


@dataclass(frozen=True, slots=True, kw_only=True)
class HintHeld(PolicyEvent):
    """A batch is about to be trained on this hint; from now on the hint is rehearsed on the prompt that it was said of.

    Of several prompts of one hint the newest are rehearsed. A hint that was retired is held again. A `merged` hint was
    said under API keys that have policies of their own: the policy of this event is to learn it too. A `followed` hint
    was not said of this prompt: the answer to it followed the hint that is held, and was accepted.
    """

    IDENTITY: ClassVar = ("policy_id", "sample_id")

    hint_id: str  # one for the same words under the same key
    hint: str
    hint_by_person: bool  # as the sample has it
    key_name: str | None  # the API key of the client that said it; None: the gateway asked for none
    session_id: str
    turn_id: str
    sample_id: str
    prompt_ids: TokenIds
    hinted_prompt_ids: TokenIds
    sampling: Sampling
    num_earlier_turns: int  # as the sample has it
    policy_version: int  # that the batch makes; of a merged hint: the newest one when the merge was asked for
    held_at_ms: int  # since the epoch, UTC
    merged: bool = False
    followed: bool = False

    @property
    def asker(self) -> str | None:
        """Who said it; None: nobody knows."""
        return asker_of(self.policy_id, self.key_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class HintRetired(PolicyEvent):
    """The hint is not rehearsed any more, until somebody says it again."""

    IDENTITY: ClassVar = ("policy_id", "hint_id", "retired_at_ms")

    hint_id: str
    reason: Retired
    retired_at_ms: int  # since the epoch, UTC


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalAsked(SessionEvent):
    """Today's policy is to answer a prompt of the past, so that a hint which was said of it is trained on again.

    The event holds all that the sample of the answer needs, since every stage may have forgotten the turn by now. Each
    rehearsal has a `session_id` of its own.
    """

    IDENTITY: ClassVar = ("turn_id", "number")

    turn_id: str
    number: int  # below 0, another one for each rehearsal of the prompt; its other answers count from 0
    policy_id: str
    hint_id: str
    hint: str
    hint_by_person: bool
    prompt_ids: TokenIds
    hinted_prompt_ids: TokenIds
    sampling: Sampling
    num_earlier_turns: int
    asked_at_ms: int  # since the epoch, UTC


def words_of(hint: str) -> str:
    """Return the hint in lower case with single spaces: two hints for which this is equal are the same hint."""
    return " ".join(hint.casefold().split())


def hint_id_of(policy_id: str, key_name: str | None, hint: str) -> str:
    """Return the id of a hint: one for the same words under the same key, whatever their case and spacing."""
    return derived_id("hint", policy_id, key_name, words_of(hint))


def rehearsal_of(held: HintHeld, *, session_id: str, number: int, at_ms: int) -> RehearsalAsked:
    """Return the request, in a session of its own: in the prompt's, it would keep stages from forgetting that one."""
    return RehearsalAsked(
        session_id=session_id,
        turn_id=held.turn_id,
        number=number,
        policy_id=held.policy_id,
        hint_id=held.hint_id,
        hint=held.hint,
        hint_by_person=held.hint_by_person,
        prompt_ids=held.prompt_ids,
        hinted_prompt_ids=held.hinted_prompt_ids,
        sampling=held.sampling,
        num_earlier_turns=held.num_earlier_turns,
        asked_at_ms=at_ms,
    )
