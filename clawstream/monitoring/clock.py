"""Whether the broker's clock can be believed, by the newest exchanges. Pure.

The one rule: the broker's clock is wrong if it dates an exchange before the exchange ended, or in the future. An
exchange that waited in a spool is appended long after it ended, which says nothing.
"""

from dataclasses import replace
from typing import NamedTuple, TypeVar

from clawstream.events import ExchangeCompleted, ExchangeFailed
from clawstream.stream.log import Arrived
from clawstream.stream.runner.dating import BELIEVED_MS, Dating
from clawstream.stream.stage import Record

AT_ONCE_MS = 60_000  # brokers with different clocks may lead partitions; exchanges older than this tell of the past
A = TypeVar("A", Record, Arrived)


class _Dated(NamedTuple):
    offset: int
    appended_ms: int
    over_ms: int  # by the gateway's clock

    def off_ms(self, now_ms: int) -> int:
        if self.appended_ms - now_ms > BELIEVED_MS:
            return self.appended_ms - now_ms
        before_ms = self.over_ms - self.appended_ms
        is_brokers = self.over_ms - now_ms <= BELIEVED_MS  # otherwise the gateway's clock is the one ahead
        return -before_ms if before_ms > BELIEVED_MS and is_brokers else 0


class BrokerClock:
    """The newest exchange of each partition, as dated by the broker's clock and by the gateway's."""

    def __init__(self) -> None:
        self._newest: dict[int, _Dated] = {}

    def learn(self, found: Arrived) -> None:
        """Take in a record as the broker dated it, in any order; records other than exchanges change nothing."""
        if not isinstance(found, Record) or not isinstance(found.event, ExchangeCompleted | ExchangeFailed):
            return
        dated = _Dated(found.offset, found.timestamp_ms, found.event.finished_at_ms)
        self._newest[found.partition] = max(dated, self._newest.get(found.partition, dated))

    def off_ms(self, now_ms: int) -> int | None:
        """Return how far the broker's clock is ahead, or behind where negative; 0: it is believed; None: not known."""
        over_ms = [min(dated.over_ms, now_ms) for dated in self._newest.values()]
        recent = [
            dated
            for dated, over in zip(self._newest.values(), over_ms, strict=True)
            if over >= max(over_ms) - AT_ONCE_MS
        ]
        return max((dated.off_ms(now_ms) for dated in recent), key=abs, default=None)


def alarm(off_ms: int | None) -> str | None:
    """Return that the broker's clock is wrong, in words for a person; None: nothing says that it is."""
    if not off_ms:
        return None
    where = "ahead of this machine's clock" if off_ms > 0 else "behind the gateway's clock"
    return (
        f"the newest exchanges are dated {abs(off_ms) / 1000:,.0f} s {where}. No stage takes a session to be over for "
        "it; set the clocks of broker and machines. The next exchange that is dated right ends this alarm"
    )


class Believed:
    """Dates records as stages do: never in the future, never before the preceding record of the partition."""

    def __init__(self) -> None:
        self._dating: dict[tuple[str, int], Dating] = {}

    def dated(self, found: A, now_ms: int) -> A:
        """Return the next record of its partition, with the append time that stages believe."""
        dating = self._dating.setdefault((found.topic, found.partition), Dating([found.topic]))
        taken_ms, _ = dating.date(found.topic, found.timestamp_ms, now_ms)
        if taken_ms == found.timestamp_ms:
            return found
        if isinstance(found, Record):
            return found._replace(timestamp_ms=taken_ms)
        return replace(found, raw=replace(found.raw, timestamp_ms=taken_ms))
