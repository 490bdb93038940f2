"""Logs that live stages have written, and replays over them in memory."""

import asyncio
import random
from collections.abc import Iterable, Sequence

from clawstream.config import JudgeSettings, Settings
from clawstream.events import Event, ReplayEnded, ReplayStarted, VotesFrom
from clawstream.judging.stage import Judge
from clawstream.replay.running import ReplayRequest, begin, shares, work_through
from clawstream.replay.stages import hosted
from clawstream.replay.work import ReplayWorker, WorkerResult
from clawstream.stream.log import Outgoing, PartitionId
from clawstream.stream.stage import Record
from clawstream.stream.topics import HINTS, SAMPLES, TURNS, VERDICTS, replay_topic, replay_topics
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.flow import Flow, Oracle, Tutor
from tests.sessions import Letters

OUTPUTS = (TURNS, VERDICTS, HINTS, SAMPLES)
SETTINGS = Settings(judge=JudgeSettings(votes=3, url="http://127.0.0.1:1/v1"))


def run_through(
    events: Iterable[Event], seed: int, judge: Oracle | None = None, *, teacher: Tutor | None = None,
    judged: bool = True, grouped: bool = False,
) -> Flow:  # fmt: skip
    """What the live stages make of the exchanges, in any order."""
    flow = Flow(judge, teacher=teacher, judged=judged, grouped=grouped)
    flow.run(events, random.Random(seed))
    return flow


async def written(flow: Flow, partitions: int) -> MemoryLog:
    """The flow's log on a broker, in the order in which it was written."""
    log = MemoryLog(MemoryBroker(partitions=partitions))
    records = [record for topic in flow.log.topics.values() for record in topic]
    await log.write([Outgoing(record.event) for record in sorted(records, key=lambda record: record.timestamp_ms)])
    return log


def wanted(
    name: str = "again", *, votes_from: VotesFrom = VotesFrom.LOG, judge: str | None = None, session: str | None = None
) -> ReplayRequest:
    return ReplayRequest(name=name, since=None, until=None, session_id=session, votes_from=votes_from, judge=judge)


async def work(
    log: MemoryLog, started: ReplayStarted, *, workers: int = 1, judge: Judge | None = None
) -> Sequence[WorkerResult]:
    """Each worker's share, at the same time."""
    partitions = 1 + max(part.partition for part in started.ranges)
    log.broker.create(replay_topics(started.replay, partitions=partitions, retention_ms=1000))
    stages, asking = hosted(SETTINGS, started, Letters(), judge)
    running = [ReplayWorker(started, log, stages, judging=asking).run(share) for share in shares(started, workers)]
    return await asyncio.gather(*running)


async def replayed(
    log: MemoryLog,
    what: ReplayRequest | None = None,
    *,
    workers: int = 1,
    judge: Judge | None = None,
    teacher: str | None = None,
    grouped: bool = False,
    settings: JudgeSettings | None = None,
) -> ReplayEnded:
    """Start a replay and work it through."""
    sections = (settings or SETTINGS.judge, SETTINGS.rewards)
    started, ended = await begin(log, what or wanted(), *sections, teacher=teacher, grouped=grouped)
    assert ended is None
    return await work_through(log, started, lambda begun: work(log, begun, workers=workers, judge=judge))


async def said(log: MemoryLog, topics: Sequence[str]) -> dict[str, dict[str, Event]]:
    """What stands on each topic by id, of two with one id the first."""
    found: dict[str, dict[str, Event]] = {topic: {} for topic in topics}
    async for records in log.follow(topics, until_end=True):
        for record in records:
            assert isinstance(record, Record)
            found[record.topic].setdefault(record.event.event_id, record.event)
    return found


def raw(log: MemoryLog, places: Iterable[PartitionId]) -> dict[PartitionId, list[bytes | None]]:
    """The bytes on each partition."""
    return {place: [record.value for record in log.broker.records(place)] for place in places}


def own(topic: str, name: str = "again") -> str:
    return replay_topic(topic, name)
