"""One worker of a replay: reads its partitions, runs the stages' folds, calls the judge and writes the events.

A vote is acknowledged by the broker before any event follows from it. So a new run after a kill finds all votes from
which events followed, and comes to the same events. Feedback on an answer is applied right after the answer, however
late it came, so each turn gets only one sample.
"""

import asyncio
import contextlib
import logging
import math
from array import array
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from clawstream import events
from clawstream.errors import TryLater, UnusableEvent
from clawstream.events import Event
from clawstream.judging.votes import Ballot
from clawstream.replay.registry import by_partition
from clawstream.replay.stages import FoldOutput, Host, Output, following
from clawstream.stream import topics
from clawstream.stream.log import Arrived, Log, PartitionId, Sealed, Undecodable
from clawstream.stream.runner.calling import StageCaller, wait_before
from clawstream.stream.runner.fold import in_clock_order
from clawstream.stream.stage import Record, Stage
from clawstream.stream.topics import replay_topic

log = logging.getLogger(__name__)

AT_ONCE = 2  # partitions
GROUP_RECORDS = 1000
GROUP_BYTES = 4 * 2**20
BREATHE_EVERY = 100  # records; the pause lets the event loop fetch more
RETRY_S = 0.25
NEWS_EVERY_S = 0.5
_ABOUT_ANSWERS = (topics.FEEDBACK, topics.ANSWERS, topics.HINTS)  # of HINTS only the scores of the replay's teacher
# Recorded events about answers, each with its topic, by session and turn; they are applied right after the answer.
AboutAnswers = dict[tuple[str, str], "list[tuple[str, events.FeedbackGiven | events.AnswerRefreshed | _Packed]]"]


class _Packed(NamedTuple):
    """A teacher's scores in an eighth of the memory, since all scores of a partition are in memory at once."""

    scored: events.TeacherScored  # without log-probs
    teacher_logprobs: "array[float] | None"
    student_logprobs: "array[float] | None"

    def unpacked(self) -> events.TeacherScored:
        return replace(
            self.scored,
            teacher_logprobs=_unpacked(self.teacher_logprobs),
            student_logprobs=_unpacked(self.student_logprobs),
        )


def _packed(scored: events.TeacherScored) -> _Packed:
    without = replace(scored, teacher_logprobs=None, student_logprobs=None)
    return _Packed(without, *map(_array, (scored.teacher_logprobs, scored.student_logprobs)))


def _array(values: events.LogProbs | None) -> "array[float] | None":
    return None if values is None else array("f", (math.nan if value is None else value for value in values))


def _unpacked(values: "array[float] | None") -> events.LogProbs | None:
    return None if values is None else tuple(None if math.isnan(value) else value for value in values)


@dataclass(slots=True, kw_only=True)
class ReplayProgress:
    """How much a worker has done so far."""

    num_exchanges: int = 0
    num_samples: int = 0
    num_calls: int = 0
    num_votes_cast: int = 0  # the votes that earlier runs asked for included
    num_unusable: int = 0


def summed(parts: Iterable[ReplayProgress]) -> ReplayProgress:
    """Return the progress of several workers together."""
    parts = list(parts)
    return ReplayProgress(
        **{field.name: sum(getattr(part, field.name) for part in parts) for field in fields(ReplayProgress)}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """How much a worker has done in all, and the digests of its samples."""

    progress: ReplayProgress
    counts: Mapping[str, int]  # events written, by type
    digests: Mapping[bytes, bytes] = field(repr=False)
    attempts: Sequence[events.TrajectoryEnded] = field(default=(), repr=False)  # the newest revision of each


class ReplayWorker:
    """Replays partitions; `judging` is the stage that calls the judge, None where recorded votes are used.

    With calls, partitions are replayed one after another. Without calls, `AT_ONCE` are replayed at once, so that one
    goes on while another waits for the broker.
    """

    def __init__(
        self,
        started: events.ReplayStarted,
        to: Log,
        stages: Callable[[], Sequence[Stage[Any, Any]]],
        *,
        judging: Stage[Any, Any] | None = None,
        exchanges_per_s: float | None = None,
        on_progress: Callable[[ReplayProgress], None] | None = None,
    ) -> None:
        self.started = started
        self.log = to
        self.stages = stages
        self.judging = judging
        self._rate = exchanges_per_s
        self._on_progress = on_progress or (lambda _: None)
        self.caller: StageCaller[Any, Any] | None = None
        self.output = Output(started.replay)
        self.progress = ReplayProgress()
        self._attempts: dict[str, events.TrajectoryEnded] = {}
        self._write_fails = False

    async def run(self, numbers: Iterable[int]) -> WorkerResult:
        """Replay these partitions; return once all their events are acknowledged."""
        self._now = asyncio.get_running_loop().time
        self._began_s = self._told_s = self._now()
        if self.judging is not None:
            self.caller = StageCaller(self.judging, retry_s=RETRY_S, on_retry=_retried)
        left = iter(numbers)
        if self.judging is not None:
            await self._work_through(left)
        else:
            async with asyncio.TaskGroup() as lanes:
                for _ in range(AT_ONCE):
                    lanes.create_task(self._work_through(left))
        self.progress.num_samples = len(self.output.digests)
        self._on_progress(self.progress)
        return WorkerResult(
            progress=self.progress,
            counts=dict(self.output.counts),
            digests=self.output.digests,
            attempts=tuple(self._attempts.values()),
        )

    def ended(self, attempt: events.TrajectoryEnded) -> None:
        """Keep the attempt's newest revision; groups are settled later, as their attempts may be on any partition."""
        known = self._attempts.get(attempt.trajectory_id, attempt)
        newer = (attempt.revision, attempt.event_id) >= (known.revision, known.event_id)
        self._attempts[attempt.trajectory_id] = attempt if newer else known

    async def _work_through(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            known = await self._known_votes(number) if self.judging is not None else {}
            async with asyncio.TaskGroup() as tasks:
                await _Partition(self, number, tasks, known, await self._read_about_answers(number)).run()

    async def _known_votes(self, number: int) -> dict[tuple[object, ...], events.VoteCast]:
        """Return the votes that earlier runs of this replay wrote, the first one on each ballot."""
        place = PartitionId(replay_topic(topics.VOTES, self.started.replay), number)
        end = (await self.log.end_offsets([place.topic]))[place]
        known: dict[tuple[object, ...], events.VoteCast] = {}
        if end:
            async for records in self.log.replay({place: (0, end)}, digest=False):
                for record in records:
                    if isinstance(record, Record) and isinstance(record.event, events.VoteCast):
                        vote = record.event
                        known.setdefault((vote.turn_id, vote.question, vote.revision, vote.ballot), vote)
        return known

    async def _read_about_answers(self, number: int) -> AboutAnswers:
        """Return the partition's recorded feedback, refreshed answers and scores, by turn, each topic's in order."""
        found: AboutAnswers = defaultdict(list)
        ranges = by_partition(self.started.ranges, number)
        places = {place: ends for place, ends in ranges.items() if place.topic in _ABOUT_ANSWERS}
        if places:
            async for records in self.log.replay(places, digest=False):
                for record in records:
                    event = record.event if isinstance(record, Record) else None
                    if isinstance(event, events.TeacherScored) and event.teacher == self.started.teacher:
                        found[event.session_id, event.turn_id].append((record.topic, _packed(event)))
                    elif isinstance(event, events.FeedbackGiven | events.AnswerRefreshed):
                        found[event.session_id, event.turn_id].append((record.topic, event))
        return found

    async def pace(self) -> None:
        """Report the progress, and wait where the replay is faster than allowed."""
        now_s = self._now()
        if now_s - self._told_s >= NEWS_EVERY_S:
            self._told_s = now_s
            self.progress.num_samples = len(self.output.digests)
            self._on_progress(replace(self.progress))
        ahead_s = 0.0 if self._rate is None else self.progress.num_exchanges / self._rate - (now_s - self._began_s)
        await asyncio.sleep(max(0.0, ahead_s))

    async def put(self, records: Sequence[Sealed], partition: int) -> None:
        attempt = 0
        while records:
            try:
                await self.log.put(records, partition)
            except TryLater as error:
                if not self._write_fails:  # thousands of calls may fail to write at once; only the first logs it
                    log.warning("replay=%s write=failed state=retrying reason=%s", self.started.replay, error)
                self._write_fails = True
                await asyncio.sleep(wait_before(attempt, RETRY_S))
                attempt += 1
            else:
                self._write_fails = False
                return


class _Partition:
    """One partition number being replayed."""

    def __init__(
        self,
        worker: ReplayWorker,
        number: int,
        tasks: asyncio.TaskGroup,
        known: Mapping[tuple[object, ...], events.VoteCast],
        about_answers: AboutAnswers,
    ) -> None:
        self._worker = worker
        self._number = number
        self._tasks = tasks
        self._known = known
        self._about_answers = about_answers
        self._host = Host(worker.stages())
        self._waiting: list[Sealed] = []
        self._waiting_bytes = 0
        self._one_flush = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self._open: dict[asyncio.Task[None], Record] = {}  # calls, and the records they follow from

    async def run(self) -> None:
        worker = self._worker
        session_id, num_read = worker.started.session_id, 0
        async with contextlib.AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(contextlib.aclosing(self._counted(place, ends)))
                for place, ends in by_partition(worker.started.ranges, self._number).items()
                if place.topic not in _ABOUT_ANSWERS
            ]
            async for records in in_clock_order(streams):
                for record in records:
                    if session_id is None or record.key == session_id:
                        if self._open:
                            await self._let_calls_end(record)
                        self._take(record)
                        if self._is_full():
                            await self._flush()
                    num_read += 1
                    if num_read % BREATHE_EVERY == 0:
                        await worker.pace()
                await worker.pace()
        while self._open:
            await self._some_call_ended()
        await self._flush()
        if self._writing is not None:
            await self._writing

    async def _counted(self, place: PartitionId, ends: tuple[int, int]) -> AsyncGenerator[Sequence[Arrived], None]:
        async with contextlib.aclosing(self._worker.log.replay({place: ends}, digest=False)) as stream:
            async for records in stream:
                bad = [record for record in records if isinstance(record, Undecodable)]
                for record in bad:
                    log.warning("record=%s-%d-%d state=passed_over reason=%s", *place, record.offset, record.reason)
                self._worker.progress.num_unusable += len(bad)
                yield records

    def _take(self, record: Record) -> None:
        self._worker.progress.num_exchanges += isinstance(
            record.event, events.ExchangeCompleted | events.ExchangeFailed
        )
        self._follow_up(record, self._feed(record))
        if isinstance(record.event, events.ExchangeCompleted):
            for topic, given in self._about_answers.pop((record.key, record.event.exchange_id), ()):
                said = following(record, topic, given.unpacked() if isinstance(given, _Packed) else given)
                self._follow_up(said, self._feed(said))

    def _feed(self, record: Record) -> FoldOutput:
        oldest_ms = min(cause.timestamp_ms for cause in self._open.values()) if self._open else None
        output = self._host.feed(record, open_since_ms=oldest_ms)
        self._worker.progress.num_unusable += output.num_unusable
        return output

    def _follow_up(self, cause: Record, output: FoldOutput) -> None:
        self._add(cause, output.events)
        for call in output.calls:
            task = self._tasks.create_task(self._call(cause, call))
            self._open[task] = cause
            task.add_done_callback(self._open.pop)

    def _is_full(self) -> bool:
        return len(self._waiting) >= GROUP_RECORDS or self._waiting_bytes >= GROUP_BYTES

    def _add(self, cause: Record, caused: Iterable[Event]) -> None:
        for event in caused:
            if isinstance(event, events.TrajectoryEnded):
                self._worker.ended(event)
                continue
            try:
                put = self._record(cause, event)
                self._waiting.append(put)
                self._waiting_bytes += len(put.value)
            except UnusableEvent as error:
                log.warning("event=%s state=passed_over reason=%s", type(event).__name__, error)
                self._worker.progress.num_unusable += 1

    async def _flush(self) -> None:
        """Begin to write the waiting records, after the group before them is written, so that the order is kept."""
        async with self._one_flush:
            if self._writing is not None:
                await self._writing
                self._writing = None
            if self._waiting:
                records, self._waiting, self._waiting_bytes = self._waiting, [], 0
                self._writing = self._tasks.create_task(self._worker.put(records, self._number))

    async def _let_calls_end(self, record: Record) -> None:
        """Wait for open calls of the record's session, if the session was silent for so long that it starts over.

        Wait also while twice `calls_at_once` calls, or more, are open.
        """
        judging = self._worker.judging
        assert judging is not None
        while len(self._open) >= 2 * judging.calls_at_once or any(
            cause.key == record.key and record.timestamp_ms - cause.timestamp_ms > judging.retain_ms
            for cause in self._open.values()
        ):
            await self._some_call_ended()

    async def _some_call_ended(self) -> None:
        await asyncio.wait(list(self._open), return_when=asyncio.FIRST_COMPLETED)

    async def _call(self, cause: Record, call: Ballot) -> None:
        worker = self._worker
        assert worker.caller is not None
        known = self._known.get((call.key.turn_id, call.key.question, call.key.revision, call.number))
        if known is not None:
            votes: Sequence[Event] = [known]
        else:
            worker.progress.num_calls += 1
            votes = await worker.caller.until_done(call)
            await worker.put([self._record(cause, vote) for vote in votes], self._number)
        worker.progress.num_votes_cast += len(votes)
        for vote in votes:
            record = following(cause, topics.VOTES, vote)
            self._follow_up(record, self._feed(record))
        if self._is_full():
            await self._flush()

    def _record(self, cause: Record, event: Event) -> Sealed:
        return self._worker.output.record(event, at_ms=cause.timestamp_ms, traceparent=cause.traceparent)


def _retried(why: str) -> None:
    log.warning("call=failed reason=%s", why)
