"""`clawstream tail`: a topic's events as people read them, as they come."""

import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol, TextIO

from clawstream.errors import OperatorError
from clawstream.projections.words import as_dict, line, printable
from clawstream.stream.log import Arrived, Start, Undecodable
from clawstream.stream.stage import Record
from clawstream.stream.topics import event_topics

_AGO = re.compile(r"(\d{1,6})(s|m|h|d)")
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class FollowedLog(Protocol):
    """What tail needs of a log."""

    def follow(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncIterator[Sequence[Arrived]]:
        """Yield what is on the topics and what comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to show."""

    topic: str  # whole
    session_id: str | None = None  # the record key, so a policy's id does too; None: all
    start: Start = "latest"
    until_end: bool = False


def wanted(topic: str, *, session_id: str | None, since: str | None, until_end: bool, now_ms: int) -> Wanted:
    """Return what the words of a command line ask for; raises OperatorError for words that it can't read.

    `topic` may be short ("turns"). Without `since` it begins now, or at the earliest record where it ends at the end.
    """
    start: Start = "earliest" if until_end else "latest"
    if since is not None:
        start = start_ms(since, now_ms)
    return Wanted(topic=_whole_name(topic), session_id=session_id, start=start, until_end=until_end)


def start_ms(since: str, now_ms: int) -> int:
    """Return the time that "90s", "5m", "2h", "1d" (before `now_ms`) or an ISO time means, in ms since the epoch."""
    ago = _AGO.fullmatch(since)
    if ago is not None:
        return now_ms - int(ago[1]) * _UNIT_MS[ago[2]]
    try:
        time = datetime.fromisoformat(since)
    except ValueError as error:
        raise OperatorError(
            f"--from {since!r} is no time: expected 90s, 5m, 2h or 1d before now, or an ISO time such as "
            "2026-11-20T14:00 (UTC where it names no zone)"
        ) from error
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)


async def tail(log: FollowedLog, what: Wanted, *, as_json: bool, out: TextIO) -> None:
    """Print each record once, in order per partition, until cancelled or, with `until_end`, where the topic ends."""
    async for arrivals in log.follow([what.topic], what.start, until_end=what.until_end):
        for arrived in arrivals:
            if isinstance(arrived, Undecodable):
                _print(_undecodable(arrived, as_json), out)
            elif what.session_id in (None, arrived.key):
                _print(json.dumps(as_dict(arrived)) if as_json else as_line(arrived), out)
        out.flush()


def as_line(record: Record) -> str:
    """Return time, event, key and what it says."""
    name = type(record.event).__name__
    return f"{_time(record.timestamp_ms)}  {name:<17}  {printable(record.key)}  {line(record.event)}"


def _undecodable(record: Undecodable, as_json: bool) -> str:
    at = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
    if as_json:
        return json.dumps(at | {"timestamp_ms": record.timestamp_ms, "type": None, "reason": record.reason})
    return f"{_time(record.timestamp_ms)}  (undecodable)  {'-'.join(map(str, at.values()))}  {printable(record.reason)}"


def _print(text: str, out: TextIO) -> None:
    out.write(f"{text}\n")


def _time(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _whole_name(topic: str) -> str:
    names = event_topics()
    found = [name for name in names if topic in (name, name.removeprefix("clawstream.").rpartition(".")[0])]
    if not found:
        raise OperatorError(f"there is no topic {topic!r}: expected one of {', '.join(names)}, or its middle word")
    return found[0]
