"""Which engine the next request of a session is put to. Pure.

The one rule: a session stays where its prefix is cached, unless that engine is not offered or clearly more loaded than
another. "Clearly" leaves room, so that a session does not move to and fro between engines of nearly equal load.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

BEHIND_FOR_S = 30.0  # engines take a version over in turn; late ones are offered for so long
SLACK_REQUESTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What is known of an engine when a request is placed."""

    version: int | None  # the one it serves; None: it does not answer
    newest_had: int  # the newest version it is known to have served, also before it was away
    behind_s: float | None  # for how long it has not served the newest version while offered; None: it was not offered


def offered(engines: Sequence[EngineLoad]) -> tuple[bool, ...]:
    """Return which engines get requests: those that answer and are not behind; where all are, the newest of them.

    An engine that came back with old weights is behind at once; one that waits for its turn in a rollout is behind
    after BEHIND_FOR_S.
    """
    newest = max((engine.version for engine in engines if engine.version is not None), default=None)
    current = tuple(_is_current(engine, newest) for engine in engines)
    return current if any(current) else tuple(newest is not None and engine.version == newest for engine in engines)


def _is_current(engine: EngineLoad, newest: int | None) -> bool:
    if engine.version is None or newest is None or engine.version < engine.newest_had:
        return False
    return engine.version == newest or (engine.behind_s is not None and engine.behind_s <= BEHIND_FOR_S)


def choose(in_flight: Sequence[int | None], *, home: int | None, order: Sequence[int]) -> int | None:
    """Return the number of the engine to ask: `home` if it will do, else the least loaded, of equals the first.

    `in_flight` counts requests by engine, None where it is not offered. `home` is the engine of the session's last
    request, `order` the order among equals. None: no engine is offered.
    """
    loads = {number: load for number, load in enumerate(in_flight) if load is not None}
    if not loads:
        return None
    least = min(loads.values())
    if home in loads and loads[home] - least <= max(SLACK_REQUESTS, least):
        return home
    return next(number for number in order if loads.get(number) == least)


def order_of(session_id: str, urls: Sequence[str]) -> list[int]:
    """Return the engines by how much they suit the session: the same for every gateway, whichever engines are away."""

    def weight(number: int) -> bytes:
        return hashlib.blake2b(f"{session_id}\n{urls[number]}".encode(), digest_size=8).digest()

    return sorted(range(len(urls)), key=weight)
