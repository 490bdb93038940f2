"""What the turns stage makes of the exchanges that a test caused."""

from collections.abc import Sequence

from clawstream.events import ExchangeCompleted, TurnPaired
from clawstream.turns.pairing import observe


def paired(exchanges: Sequence[ExchangeCompleted]) -> list[TurnPaired]:
    """The turns of one session, in order."""
    session, found = None, []
    for exchange in exchanges:
        session, events, _ = observe(session, exchange, exchange.finished_at_ms)
        found += [event for event in events if isinstance(event, TurnPaired)]
    return found
