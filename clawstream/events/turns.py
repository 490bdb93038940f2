"""Turns: an answer and what happened next. A turn is named by the exchange that answered."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from clawstream.events.base import SessionEvent


class OrphanReason(StrEnum):
    """Why no later request of the session shows what came of an answer."""

    EDITED = "edited"  # the history holds another assistant message in its place
    COMPACTED = "compacted"  # the history is shorter than it was, and the answer is not in it
    REGENERATED = "regenerated"  # another answer to the same request was echoed: it was asked again, or had several
    RESET = "reset"  # the history starts over


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPaired(SessionEvent):
    """The answer of exchange `turn_id` came back in the history of `next_exchange_id`: it was delivered.

    An interrupted answer was delivered in part; the history goes on after the question, with or without that part. The
    next state is one reply of the user, or the results of all parallel tool calls, without what a client adds itself.
    """

    IDENTITY: ClassVar = ("turn_id",)

    turn_id: str
    next_exchange_id: str
    next_state: tuple[int, ...]  # indices into the whole request's messages, ascending, not empty
    interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOrphaned(SessionEvent):
    """The session went on without echoing this answer. No judge is asked about it; a sample of it needs feedback."""

    IDENTITY: ClassVar = ("turn_id",)

    turn_id: str
    next_exchange_id: str
    reason: OrphanReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsSettled(SessionEvent):
    """The session is over or idle, and every pairing that its exchanges show stands before this event on the topic.

    Written for sessions with at least one answer that could become a turn.
    """

    IDENTITY: ClassVar = ("session_id", "after_exchange_id", "done")

    after_exchange_id: str  # the session's newest exchange
    done: bool  # True: the client said that it is over; False: it is idle, and a later request may still echo answers
