"""`clawstream tail`: prints a topic's events in readable form, as they come."""

import json
import re
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from clawstream.errors import OperatorError
from clawstream.projections.look.summaries import as_dict, line, printable
from clawstream.stream.log import Arrived, Log, PartitionId, Start, Undecodable
from clawstream.stream.stage import Record
from clawstream.stream.topics import event_topics

_AGO = re.compile(r"(\d{1,6})(s|m|h|d)")
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class TailOptions:
    """Which records to show."""

    topic: str  # the whole name
    session_id: str | None = None  # the key of the records, so a policy's id works too; None: all records
    start: Start = "latest"
    until_end: bool = False


def tail_options(topic: str, *, session_id: str | None, since: str | None, until_end: bool, now_ms: int) -> TailOptions:
    """Return the options that the words of a command line ask for; raises OperatorError for words that make no sense.

    `topic` may be short ("turns"). Without `since`, tail begins now, or at the earliest record if `until_end` is set.
    """
    start: Start = "earliest" if until_end else "latest"
    if since is not None:
        start = start_ms(since, now_ms)
    return TailOptions(topic=_whole_name(topic), session_id=session_id, start=start, until_end=until_end)


def start_ms(since: str, now_ms: int) -> int:
    """Return the time meant by "90s", "5m", "2h", "1d" (before `now_ms`) or an ISO time, in ms since the epoch."""
    ago = _AGO.fullmatch(since)
    if ago is not None:
        return now_ms - int(ago[1]) * _UNIT_MS[ago[2]]
    try:
        time = datetime.fromisoformat(since)
    except ValueError as error:
        raise OperatorError(
            f"--from {since!r} is no time: expected how long ago (90s, 5m, 2h or 1d), or an ISO time such as "
            "2026-11-20T14:00 (in UTC if it names no zone)"
        ) from error
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)


async def tail(log: Log, what: TailOptions, *, as_json: bool, out: TextIO) -> None:
    """Print each record once until cancelled or, with `until_end`, where the topic ends.

    Existing records are printed in order of append time, later ones as they arrive.
    """
    ends = await log.end_offsets([what.topic])
    starts = await log.offsets_at([what.topic], what.start) if what.start != "latest" else ends
    ranges = {place: (start, ends[place]) for place, start in starts.items() if start < ends[place]}
    async with aclosing(in_time_order(log.replay(ranges), ranges)) as there:
        async for arrived in there:
            _show(arrived, what, as_json=as_json, out=out)
    out.flush()
    if what.until_end:
        return
    async for arrivals in log.follow([what.topic], dict[tuple[str, int], int](ends.items())):
        for arrived in arrivals:
            _show(arrived, what, as_json=as_json, out=out)
        out.flush()


async def in_time_order(
    batches: AsyncGenerator[Sequence[Arrived], None], ranges: Mapping[PartitionId, tuple[int, int]]
) -> AsyncGenerator[Arrived, None]:
    """Yield the records of `batches`, which are those in `ranges`: the oldest first, and each partition's in order.

    Records of a slower partition are waited for, so at worst all records are held until the batches end.
    """
    held = {place: deque[Arrived]() for place in ranges}
    pending = set(ranges)  # partitions that may still have an older record than all held ones
    async with aclosing(batches):
        async for arrivals in batches:
            for arrived in arrivals:
                place = PartitionId(arrived.topic, arrived.partition)
                held[place].append(arrived)
                if arrived.offset + 1 >= ranges[place][1]:
                    pending.discard(place)
            while all(held[place] for place in pending) and any(held.values()):
                yield _oldest(held)
    while any(held.values()):
        yield _oldest(held)


def _oldest(held: Mapping[PartitionId, deque[Arrived]]) -> Arrived:
    return min((queue for queue in held.values() if queue), key=lambda queue: queue[0].timestamp_ms).popleft()


def _show(arrived: Arrived, what: TailOptions, *, as_json: bool, out: TextIO) -> None:
    if isinstance(arrived, Undecodable):
        out.write(_undecodable(arrived, as_json) + "\n")
    elif what.session_id in (None, arrived.key):
        out.write((json.dumps(as_dict(arrived)) if as_json else as_line(arrived)) + "\n")


def as_line(record: Record) -> str:
    """Return a line with time, event, key and summary."""
    name = type(record.event).__name__
    return f"{_time(record.timestamp_ms)}  {name:<17}  {printable(record.key)}  {line(record.event)}"


def _undecodable(record: Undecodable, as_json: bool) -> str:
    at = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
    if as_json:
        return json.dumps(at | {"timestamp_ms": record.timestamp_ms, "type": None, "reason": record.reason})
    return f"{_time(record.timestamp_ms)}  (undecodable)  {'-'.join(map(str, at.values()))}  {printable(record.reason)}"


def _time(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _whole_name(topic: str) -> str:
    names = event_topics()
    found = [name for name in names if topic in (name, name.removeprefix("clawstream.").rpartition(".")[0])]
    if not found:
        raise OperatorError(f"there is no topic {topic!r}: expected one of {', '.join(names)}, or just its middle word")
    return found[0]
