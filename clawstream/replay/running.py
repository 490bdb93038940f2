"""Runs a replay from beginning to end; compares its verdicts with the live ones, in a table and a plot.

The ranges that a replay reads are noted on the log first, so a second run under the same name reads the same records
and writes the same events again. The votes that it asked for are on the log too, and are not asked for again.
"""

import csv
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from clawstream.config import JudgeSettings, RewardsSettings
from clawstream.errors import ConfigError
from clawstream.events import (
    EVERYTHING,
    Event,
    ExchangeCompleted,
    LearnsFrom,
    ReplayEnded,
    ReplayStarted,
    RewardWeights,
    TrajectoryEnded,
    VotesFrom,
)
from clawstream.groups.trajectories import settled_at_once
from clawstream.judging.prompts import PROMPT_VERSION
from clawstream.replay.comparing import SCORES, ComparedTurn, Comparison, compare
from clawstream.replay.registry import Registry, frozen
from clawstream.replay.stages import Output, samples_sha256
from clawstream.replay.work import WorkerResult, summed
from clawstream.stream import topics
from clawstream.stream.log import Log, PartitionId, Sealed
from clawstream.stream.stage import Record, now_ms
from clawstream.stream.topics import replay_topic

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """The replay that a person asks for."""

    name: str
    since: str | None
    until: str | None
    session_id: str | None
    votes_from: VotesFrom
    judge: str | None  # the judge to ask, or whose votes alone count; None: the votes of all judges count


def refuse_name(name: str) -> None:
    """Raise ConfigError for a name that no replay can have, since names of topics and folders contain it."""
    if NAME.fullmatch(name) is None:
        raise ConfigError(f"a replay can't be named {name!r}: use up to 63 of a-z, 0-9, - and _")


async def begin(
    log: Log,
    wanted: ReplayRequest,
    judge: JudgeSettings,
    rewards: RewardsSettings,
    *,
    learns: LearnsFrom = EVERYTHING,
    grouped: bool = False,
    teacher: str | None = None,
) -> tuple[ReplayStarted, ReplayEnded | None]:
    """Return the replay's first event, written now or by an earlier run, and how it ended (None: it has not).

    `learns` is what the trainer can use, and `grouped` whether it learns from groups. Hints are weighed by the recorded
    scores of `teacher`; None: by the trainer. Raises ConfigError for an invalid name, or one of another replay.
    """
    refuse_name(wanted.name)
    registry = await Registry.read(log)
    started = registry.started.get(wanted.name)
    if started is not None:
        _refuse_another(started, wanted)
        return started, registry.ended.get(wanted.name)
    started_at_ms = now_ms()
    started = ReplayStarted(
        replay=wanted.name,
        votes_from=wanted.votes_from,
        judge=wanted.judge,
        prompt_version=PROMPT_VERSION if wanted.votes_from is VotesFrom.NEW else None,
        session_id=wanted.session_id,
        num_votes=judge.num_votes,
        quorum=judge.needed,
        ranges=await frozen(
            log,
            since=wanted.since,
            until=wanted.until,
            votes_from=wanted.votes_from,
            now_ms=started_at_ms,
            scored=teacher is not None,
        ),
        started_at_ms=started_at_ms,
        reward_weights=RewardWeights(**rewards.weights),
        hint_quorum=judge.needed_for_a_hint,
        teacher=teacher,
        heuristic_function=rewards.heuristic_function,
        learns=learns,
        judged=wanted.votes_from is VotesFrom.NEW or wanted.judge is not None or judge.url is not None,
        grouped=grouped,
    )
    await log.append([started])
    return started, None


async def work_through(
    log: Log, started: ReplayStarted, work: Callable[[ReplayStarted], Awaitable[Sequence[WorkerResult]]]
) -> ReplayEnded:
    """Let `work` do the whole replay, settle its groups, and write to the log how it ended."""
    outcomes = await work(started)
    if started.grouped:
        await log.put(_settled(started, [attempt for outcome in outcomes for attempt in outcome.attempts]), partition=0)
    digests = {name: digest for outcome in outcomes for name, digest in outcome.digests.items()}
    counts = sum((Counter(outcome.counts) for outcome in outcomes), Counter[str]())
    progress = summed([outcome.progress for outcome in outcomes])
    ended = ReplayEnded(
        replay=started.replay,
        num_exchanges=progress.num_exchanges,
        num_turns=counts["TurnPaired"],
        num_verdicts=counts["VerdictReached"],
        num_hints=counts["HintFound"],
        num_samples=len(digests),
        num_refused=counts["SampleRefused"],
        num_calls=progress.num_calls,
        num_unusable=progress.num_unusable,
        samples_sha256=samples_sha256(digests),
        ended_at_ms=now_ms(),
        num_votes_cast=progress.num_votes_cast,
    )
    await log.append([ended])
    return ended


def _settled(started: ReplayStarted, attempts: Sequence[TrajectoryEnded]) -> list[Sealed]:
    """Return the records of all attempts and of the settlements of their groups; none is late, as all are known."""
    output = Output(started.replay)
    ended = sorted(attempts, key=lambda one: (one.group_id, one.trajectory_id))
    at_ms = {one.event_id: one.ended_at_ms for one in ended}
    settled = settled_at_once(ended, started.reward_weights)
    at_ms |= {one.event_id: max(at_ms[attempt] for attempt in one.trajectories) for one in settled}
    events: list[Event] = [*ended, *settled]
    return [output.record(event, at_ms=at_ms[event.event_id], traceparent=None) for event in events]


def shares(started: ReplayStarted, num_workers: int) -> list[list[int]]:
    """Deal the partition numbers out to workers, those with most records first; return each worker's, none empty."""
    sizes = Counter[int]()
    for part in started.ranges:
        sizes[part.partition] += part.end_offset - part.first_offset
    dealt: list[list[int]] = [[] for _ in range(num_workers)]
    for number, _ in sizes.most_common():
        min(dealt, key=lambda share: sum(sizes[other] for other in share)).append(number)
    return [share for share in dealt if share]


def _refuse_another(started: ReplayStarted, wanted: ReplayRequest) -> None:
    for name, before, value in (
        ("votes-from", started.votes_from, wanted.votes_from),
        ("judge", started.judge, wanted.judge),
        ("session", started.session_id, wanted.session_id),
    ):
        if before != value:
            raise ConfigError(
                f"replay {wanted.name!r} was begun with {name} {before}, not {value}: nothing was done. Give the new "
                "replay another name; or, to finish that one, give the same options as then (its range stays)"
            )


async def compared(log: Log, started: ReplayStarted) -> Comparison:
    """Return the replay's verdicts compared with the live ones on the same answers, up to now."""
    ranges = {
        PartitionId(part.topic, part.partition): (part.first_offset, part.end_offset)
        for part in started.ranges
        if part.topic == topics.EXCHANGES and part.first_offset < part.end_offset
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
    live = await _read(log, [topics.VERDICTS, topics.VOTES])
    again = await _read(log, [replay_topic(topic, started.replay) for topic in (topics.VERDICTS, topics.VOTES)])
    return compare(live, again, turn_ids=frozenset(turn_ids))


def write_csv(comparison: Comparison, file: Path) -> None:
    """Write a row for each turn; absent values are empty."""
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow([field.name for field in fields(ComparedTurn)])
        writer.writerows(astuple(turn) for turn in comparison.turns)


def write_plot(comparison: Comparison, file: Path) -> None:
    """Draw how many turns have each pair of scores (live, replay), and how many each score on either side."""
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


async def _read(log: Log, names: Sequence[str]) -> list[Event]:
    found: list[Event] = []
    async for records in log.follow(names, until_end=True):
        found += [record.event for record in records if isinstance(record, Record)]
    return found
