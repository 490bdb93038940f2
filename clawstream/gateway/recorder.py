"""Exchanges onto the log: what is new of each, acknowledged within a stated time or not at all.

The one rule: an exchange may only refer to a parent that is on the log. So a session's newest request becomes a parent
when Kafka has acknowledged it, and one that the gateway does not know (restart, forgotten) is followed by a whole one.
Stages forget a session that is done or was silent for a day, so here it is forgotten sooner.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

from clawstream.errors import TryLater, UnusableEvent
from clawstream.events import Event, ExchangeCompleted, ExchangeFailed, RequestDelta, SessionDone
from clawstream.events.history import Parent, WholeRequest, shorten

MAX_PARENT_TOKENS = 4_000_000  # of all parents together; a token takes about 36 bytes here
PARENT_FOR_MS = 12 * 3_600_000
E = TypeVar("E", ExchangeCompleted, ExchangeFailed)


class _Known(NamedTuple):
    """A session's newest exchange, and when it was answered."""

    parent: Parent
    at_ms: int


class Appends(Protocol):
    """The part of a log that a recorder needs."""

    async def append(
        self, events: Sequence[Event], traceparent: str | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Return when all events are acknowledged; raises TryLater or UnusableEvent."""

    def healthy(self) -> bool:
        """Whether the broker answered when it was last asked."""


class Recorder:
    """Writes exchanges to `log`, each acknowledged within `ack_timeout_s`."""

    def __init__(self, log: Appends, *, ack_timeout_s: float) -> None:
        self._log = log
        self._ack_timeout_s = ack_timeout_s
        self._parents: OrderedDict[str, _Known] = OrderedDict()
        self._parent_tokens = 0

    @property
    def problem(self) -> str | None:
        """Why nothing can be recorded now, as far as that is known."""
        return None if self._log.healthy() else "the broker does not answer"

    async def write(
        self,
        session_id: str,
        request: WholeRequest,
        event_of: Callable[[RequestDelta], E],
        *,
        then: Sequence[Event] = (),
        traceparent: str | None = None,
    ) -> E:
        """Append the exchange, and `then` after it; return it once it is acknowledged. Raises TryLater."""
        known = self._parents.get(session_id)
        parent = None if known is None else known.parent
        event = event_of(shorten(request, parent))
        if known is not None and event.received_at_ms - known.at_ms > PARENT_FOR_MS:
            event = event_of(shorten(request, None))
        await self.append((event, *then), traceparent)
        if isinstance(event, ExchangeCompleted) and not any(isinstance(one, SessionDone) for one in then):
            whole = parent is None or event.request.parent_exchange_id is None
            kept = replace(request, num_parents=0 if parent is None or whole else parent.request.num_parents + 1)
            self._remember(session_id, Parent(exchange_id=event.exchange_id, request=kept), event.finished_at_ms)
        return event

    async def append(self, events: Sequence[Event], traceparent: str | None = None) -> None:
        """Append `events`, acknowledged within the timeout. Raises TryLater.

        What was not acknowledged in time may still reach the log later; it says what happened all the same.
        """
        try:
            await self._log.append(events, traceparent, timeout_s=self._ack_timeout_s)
        except UnusableEvent as error:
            raise TryLater(f"the exchange can't be recorded: {error}") from error
        for event in events:
            if isinstance(event, SessionDone):
                self._forget(event.session_id)

    def _remember(self, session_id: str, parent: Parent, at_ms: int) -> None:
        """Make the exchange its session's parent; the sessions that were silent longest are forgotten first."""
        self._forget(session_id)
        self._parents[session_id] = _Known(parent, at_ms)
        self._parent_tokens += len(parent.request.token_ids)
        while self._parent_tokens > MAX_PARENT_TOKENS and len(self._parents) > 1:
            self._forget(next(iter(self._parents)))

    def _forget(self, session_id: str) -> None:
        forgotten = self._parents.pop(session_id, None)
        if forgotten is not None:
            self._parent_tokens -= len(forgotten.parent.request.token_ids)
