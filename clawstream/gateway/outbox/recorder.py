"""Writes exchanges to the log, each without the messages and tokens that its parent has already.

The one rule: an exchange may only refer to a parent that is before it on the log. So a session's newest answer becomes
a parent once it is kept (delivery.py); where the gateway knows no parent (restart, forgotten), it writes a whole
request. Stages forget a session that is done or was silent for a day, so the recorder forgets it sooner.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

from clawstream.conversation.history import Parent, WholeRequest, shorten
from clawstream.errors import TryLater, UnusableEvent
from clawstream.events import Event, ExchangeCompleted, ExchangeFailed, RequestDelta, SessionDone

MAX_PARENT_TOKENS = 4_000_000  # of all parents together; a token takes about 36 bytes here
PARENT_FOR_MS = 12 * 3_600_000
E = TypeVar("E", ExchangeCompleted, ExchangeFailed)


class _Known(NamedTuple):
    """A session's newest exchange, and when it was answered."""

    parent: Parent
    at_ms: int


class Appends(Protocol):
    """The method of a log that a recorder uses."""

    async def append(self, events: Sequence[Event], traceparent: str | None = None) -> None:
        """Return when all events, of one session, are kept; raises TryLater or UnusableEvent."""


class Recorder:
    """Writes exchanges to `log`."""

    def __init__(self, log: Appends) -> None:
        self._log = log
        self._parents: OrderedDict[str, _Known] = OrderedDict()
        self._parent_tokens = 0

    async def write(
        self,
        session_id: str,
        request: WholeRequest,
        event_of: Callable[[RequestDelta], E],
        *,
        then: Sequence[Event] = (),
        traceparent: str | None = None,
    ) -> E:
        """Append the exchange, and `then` after it; return it once it is kept. Raises TryLater."""
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
        """Append `events`, of one session. Raises TryLater.

        An event that was not kept may still reach the log later, which does no harm: it states what happened.
        """
        try:
            await self._log.append(events, traceparent)
        except UnusableEvent as error:
            raise TryLater(f"it can't be recorded: {error}") from error
        for event in events:
            if isinstance(event, SessionDone):
                self._forget(event.session_id)

    def _remember(self, session_id: str, parent: Parent, at_ms: int) -> None:
        """Make the exchange its session's parent; when full, forget the sessions that were silent longest."""
        self._forget(session_id)
        self._parents[session_id] = _Known(parent, at_ms)
        self._parent_tokens += len(parent.request.token_ids)
        while self._parent_tokens > MAX_PARENT_TOKENS and len(self._parents) > 1:
            self._forget(next(iter(self._parents)))

    def _forget(self, session_id: str) -> None:
        forgotten = self._parents.pop(session_id, None)
        if forgotten is not None:
            self._parent_tokens -= len(forgotten.parent.request.token_ids)
