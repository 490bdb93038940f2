"""The turns stage: reads exchanges, writes turns, and marks silent sessions as idle on the log.

The one rule: a session ends by a record on the log or by the log's clock, never by this machine's clock.
"""

from clawstream.events import Event, ExchangeCompleted, ExchangeFailed, SessionDone, SessionIdle, TurnsSettled
from clawstream.stream import topics
from clawstream.stream.stage import Record, Stage, Step
from clawstream.turns.pairing import PairingState, observe

SESSION_IDLE_S = 1800  # so a meal or a meeting does not end a session


def turns_stage() -> Stage[PairingState, None]:
    """Return the stage that pairs each answer with its next state."""
    return Stage(
        name="turns",
        reads=(topics.EXCHANGES,),
        step=step,
        ordered=True,
        tick=lambda session, now_ms: tick(session, now_ms, SESSION_IDLE_S),
    )


def step(session: PairingState | None, record: Record) -> Step[PairingState, None]:
    """Return the session after `record`, and the turns that it decides."""
    event = record.event
    if isinstance(event, ExchangeCompleted | ExchangeFailed):
        return observe(session, event, record.timestamp_ms)
    if session is None:
        return Step(None)
    if isinstance(event, SessionDone):
        return Step(None, _settled(session, done=True))
    # An idle mark counts only if no newer exchange reached the log before it.
    if isinstance(event, SessionIdle) and event.after_exchange_id == session.newest_exchange_id:
        idle = session._replace(idle_after=event.after_exchange_id)
        return Step(idle, _settled(session, done=False))
    return Step(session)


def tick(session: PairingState, now_ms: int, idle_s: int) -> Step[PairingState, None]:
    """Mark the session as idle, once, when nothing has followed its newest exchange for `idle_s`."""
    newest = session.newest_exchange_id
    if session.idle_after == newest or now_ms - session.newest_at_ms < idle_s * 1000:
        return Step(session)
    idle = SessionIdle(session_id=session.session_id, after_exchange_id=newest, idle_s=idle_s)
    return Step(session._replace(idle_after=newest), [idle])


def _settled(session: PairingState, *, done: bool) -> list[Event]:
    if not session.answered:
        return []
    return [TurnsSettled(session_id=session.session_id, after_exchange_id=session.newest_exchange_id, done=done)]
