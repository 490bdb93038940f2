"""How an installation fares at this moment, and how the monitor and `clawstream status` read its log.

A value that can't be known is None, and `problems` says why: there is a status even where nothing runs.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from clawstream.config import KafkaSettings, TrainingSettings
from clawstream.errors import PartUnavailable, TopicMismatch, TryLater
from clawstream.events import VerdictReached
from clawstream.monitoring.alarm import BatchRule, JudgeReachability, ReadVotes, TrainerSign, by_votes, readings
from clawstream.monitoring.policy import LearnedFrom, PolicyBoard
from clawstream.monitoring.windows import AppendTimes, BrokerClock
from clawstream.monitoring.windows import alarm as clock_alarm
from clawstream.stream import topics
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Start
from clawstream.stream.stage import Record, now_ms

GROUP = "monitor"
NUM_VOTES = 20  # of each partition; they show whether the judge answers
NUM_EXCHANGES = 3  # of each partition: its newest exchange shows the broker's clock, but ends of sessions may follow it
TOPICS = (topics.EXCHANGES, topics.TURNS, topics.VOTES, topics.VERDICTS, topics.ANSWERS, topics.SAMPLES, topics.POLICY)
# Each reads as a group of this name; the trainer reads without a group.
STAGES = ("turns", "judging", "heuristics", "samples", "project", GROUP)
REFRESHING = ("refresh",)  # also run where prompts are answered again
GROUPED = ("trajectories", "groups")  # also run where groups are trained on
NUM_VERDICTS = 5
LOG_WITHIN_S = 20.0
MONITOR_WITHIN_S = 3.0


def due_of(training: TrainingSettings) -> BatchRule | None:
    """Return when the trainer takes a batch; None: that depends on groups, so samples alone don't tell."""
    if training.method == "stepwise":
        return None
    return BatchRule(batch_samples=training.batch_samples, max_wait_ms=round(training.max_wait_s * 1000))


async def newest_records(kafka_log: KafkaLog, topic: str, most: int) -> list[Record]:
    """Return the newest records of each partition, at most `most` of each."""
    begins = await kafka_log.begin_offsets([topic])
    ends = await kafka_log.end_offsets([topic])
    ranges = {place: (max(begins[place], end - most), end) for place, end in ends.items()}
    return [record async for records in kafka_log.replay(ranges) for record in records if isinstance(record, Record)]


async def read_policy(kafka_log: KafkaLog, board: PolicyBoard) -> None:
    """Let `board` take in all that the policy topic has by now."""
    await _learn(kafka_log, board, topics.POLICY, "earliest")


async def read_samples(kafka_log: KafkaLog, board: PolicyBoard) -> None:
    """Let `board`, which knows the policy topic, take in the samples that may be in no plan yet."""
    await _learn(kafka_log, board, topics.SAMPLES, await waiting_since(kafka_log, board))


async def _learn(kafka_log: KafkaLog, board: PolicyBoard, topic: str, start: Start) -> None:
    append_times = AppendTimes()
    async for records in kafka_log.follow([topic], start, until_end=True):
        for record in records:
            if isinstance(record, Record):
                board.learn(append_times.corrected(record, now_ms()))


async def waiting_since(kafka_log: KafkaLog, board: PolicyBoard) -> dict[tuple[str, int], int]:
    """Return, by partition, the first offset whose sample may be in none of the plans that `board` knows."""
    begins = await kafka_log.begin_offsets([topics.SAMPLES])
    return {place: max(begin, board.used_up.get(place, begin)) for place, begin in begins.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentVerdict:
    """One of the last verdicts."""

    at_ms: int  # when the broker appended it
    session_id: str
    turn_id: str
    status: str
    score: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStatus:
    """What the log says."""

    lag_records: Mapping[str, int | None]  # by stage; None: the stage has never read
    published_version: int | None
    active_versions: Mapping[str, int]  # by engine
    rejected_version: int | None  # that of the newest step, if it was rejected
    rejected_because: str | None
    alarm: str | None  # why learning stands still; None: it does not
    samples_waiting: int
    oldest_waiting_at_ms: int | None  # when the broker appended the oldest waiting sample; None: none waits
    last_verdicts: tuple[RecentVerdict, ...]  # the newest first
    learned_from: LearnedFrom | None = None  # None: nothing was read
    trainer: TrainerSign | None = None  # the newest event of the trainer on the log; None: there is none
    judge: JudgeReachability | None = None  # by its newest votes; None: there are none, or no judge is asked
    votes: ReadVotes | None = None  # the judge's newest; None: there are none, or no judge is asked
    clock_alarm: str | None = None  # says that the broker's clock is wrong; None: nothing indicates that it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What the log and the monitor say; None: it was not asked or did not answer, and `problems` says why not."""

    log: LogStatus | None
    monitor: Mapping[str, Any] | None  # as GET /windows answers
    problems: tuple[str, ...] = field(default=())


async def status(
    kafka: KafkaSettings,
    *,
    policy_id: str,
    optional: Sequence[str],
    monitor_url: str | None,
    due: BatchRule | None = None,
    judge: str | None = None,
) -> Status:
    """Ask the log (where `kafka` names a broker) and the monitor (where it has an address), both at once.

    `optional` names the stages that are to run besides those that always run; `due` says when a batch is due; `judge`
    is the judge that is asked.
    """
    board = PolicyBoard(policy_id, due)
    problems: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        log = tasks.create_task(_log(kafka, board, problems, optional, judge))
        monitor = tasks.create_task(_monitor(monitor_url, problems))
    return Status(log=log.result(), monitor=monitor.result(), problems=tuple(problems))


async def _log(
    kafka: KafkaSettings, board: PolicyBoard, problems: list[str], optional: Sequence[str], judge: str | None
) -> LogStatus | None:
    if kafka.bootstrap is None:
        problems.append("no broker runs here and none is set (kafka.bootstrap)")
        return None
    try:
        async with (
            asyncio.timeout(LOG_WITHIN_S),
            KafkaLog.connect(kafka.bootstrap, prefix=kafka.prefix, client_id="status", security=kafka) as kafka_log,
        ):
            return await read_log(kafka_log, board, optional, judge)
    except (PartUnavailable, TopicMismatch, TryLater) as error:
        problems.append(str(error))
    except TimeoutError:
        problems.append(f"the log at {kafka.bootstrap} was not read within {LOG_WITHIN_S:g} s")
    return None


async def read_log(
    kafka_log: KafkaLog, board: PolicyBoard, optional: Sequence[str], judge: str | None = None
) -> LogStatus:
    """Return what the log says by now; `board` has to be a new one."""
    await read_policy(kafka_log, board)
    await read_samples(kafka_log, board)
    votes = () if judge is None else await newest_records(kafka_log, topics.VOTES, NUM_VOTES)
    return LogStatus(
        lag_records={stage: await kafka_log.lag(stage) for stage in (*STAGES, *optional)},
        published_version=board.published_version,
        active_versions=dict(board.active_versions),
        rejected_version=None if board.rejected is None else board.rejected.policy_version,
        rejected_because=None if board.rejected is None else board.rejected.reason,
        alarm=board.alarm(now_ms()),
        samples_waiting=board.num_waiting,
        oldest_waiting_at_ms=board.oldest_ms,
        last_verdicts=await _last_verdicts(kafka_log),
        learned_from=board.learned_from,
        trainer=board.trainer,
        judge=None if judge is None else by_votes(votes, judge),
        votes=None if judge is None else readings(votes, judge),
        clock_alarm=await _clock_alarm(kafka_log),
    )


async def _last_verdicts(kafka_log: KafkaLog) -> tuple[RecentVerdict, ...]:
    found = [
        RecentVerdict(
            at_ms=record.timestamp_ms,
            session_id=record.event.session_id,
            turn_id=record.event.turn_id,
            status=record.event.status.value,
            score=record.event.score,
        )
        for record in await newest_records(kafka_log, topics.VERDICTS, NUM_VERDICTS)
        if isinstance(record.event, VerdictReached)
    ]
    return tuple(sorted(found, key=lambda verdict: verdict.at_ms, reverse=True)[:NUM_VERDICTS])


async def _clock_alarm(kafka_log: KafkaLog) -> str | None:
    clock = BrokerClock()
    for record in await newest_records(kafka_log, topics.EXCHANGES, NUM_EXCHANGES):
        clock.learn(record)
    return clock_alarm(clock.off_ms(now_ms()))


async def _monitor(url: str | None, problems: list[str]) -> Mapping[str, Any] | None:
    if url is None:
        return None
    timeout = aiohttp.ClientTimeout(total=MONITOR_WITHIN_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.get(f"{url}/windows", allow_redirects=False) as response,
        ):
            if response.status != 200:
                problems.append(f"the monitor at {url} answers with status {response.status}")
                return None
            windows: Mapping[str, Any] = await response.json()
            return windows
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        problems.append(f"the monitor at {url} does not answer ({type(error).__name__} {error})")
        return None
