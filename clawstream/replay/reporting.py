"""A comparison read from the log, and written to files: a row for each turn, and a plot."""

import csv
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, Protocol

from clawstream.events import Event, ExchangeCompleted, ReplayStarted
from clawstream.replay.comparing import SCORES, ComparedTurn, Comparison, compare
from clawstream.replay.registry import EXCHANGES, VOTES
from clawstream.stream.log import Arrived, PartitionId, Start
from clawstream.stream.stage import Record
from clawstream.stream.topics import replay_topic

VERDICTS = "clawstream.verdicts.v1"


class ReadLog(Protocol):
    """The part of a log that is needed."""

    def follow(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncIterator[Sequence[Arrived]]: ...
    def replay(self, ranges: Mapping[PartitionId, tuple[int, int]]) -> AsyncGenerator[Sequence[Arrived], None]: ...


async def compared(log: ReadLog, started: ReplayStarted) -> Comparison:
    """Return the replay's verdicts compared with the live ones on the same answers, up to now."""
    ranges = {
        PartitionId(part.topic, part.partition): (part.first_offset, part.end_offset)
        for part in started.ranges
        if part.topic == EXCHANGES and part.first_offset < part.end_offset
    }
    turn_ids: set[str] = set()
    async for records in log.replay(ranges):
        turn_ids |= {
            record.event.exchange_id
            for record in records
            if isinstance(record, Record)
            and isinstance(record.event, ExchangeCompleted)
            and started.session_id in (None, record.key)
        }
    live = await _read(log, [VERDICTS, VOTES])
    again = await _read(log, [replay_topic(topic, started.replay) for topic in (VERDICTS, VOTES)])
    return compare(live, again, turn_ids=frozenset(turn_ids))


def write_csv(comparison: Comparison, file: Path) -> None:
    """Write a row for each turn; absent values are empty."""
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow([field.name for field in fields(ComparedTurn)])
        writer.writerows(astuple(turn) for turn in comparison.turns)


def write_plot(comparison: Comparison, file: Path) -> None:
    """Draw how many turns have which scores on either side, and each side's scores."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    names = [*map(str, SCORES), "none"]
    counts = [[comparison.confusion.get((live, again), 0) for again in (*SCORES, None)] for live in (*SCORES, None)]
    highest = max(map(max, counts))
    figure, (square, bars) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    square.imshow(counts, cmap="Blues")
    for row, line in enumerate(counts):
        for column, count in enumerate(line):
            ink = "white" if 2 * count > highest else "black"
            square.text(column, row, str(count), ha="center", va="center", color=ink)
    square.set(xlabel="score in the replay", ylabel="score live", title="turns judged by both")
    _ticks(square.xaxis, names)
    _ticks(square.yaxis, names)
    sides = {"live": [sum(line) for line in counts], "replay": [sum(column) for column in zip(*counts, strict=True)]}
    for shift, (side, heights) in zip((-0.2, 0.2), sides.items(), strict=True):
        bars.bar([place + shift for place in range(len(names))], heights, width=0.4, label=side)
    bars.set(xlabel="score", ylabel="turns", title="scores")
    _ticks(bars.xaxis, names)
    bars.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _ticks(axis: Any, names: Sequence[str]) -> None:
    axis.set_ticks(range(len(names)), labels=names)


async def _read(log: ReadLog, topics: Sequence[str]) -> list[Event]:
    found: list[Event] = []
    async for records in log.follow(topics, until_end=True):
        found += [record.event for record in records if isinstance(record, Record)]
    return found
