"""The folds of turns, judging, samples and attempts on one partition of a replay, and their events as records.

A fold gives the same events here as its stage does live, because a stage's events do not depend on the order in which
records of different topics come. An event gets the time of the record that it follows from. The digest of all samples
depends neither on their order nor on the number of partitions.
"""

import hashlib
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from clawstream.config import JudgeSettings, Settings
from clawstream.conversation.continuing import Renderer
from clawstream.errors import UnusableEvent
from clawstream.events import Event, ReplayStarted, SampleAssembled, VotesFrom
from clawstream.groups.stage import trajectories_stage
from clawstream.judging.stage import Judge, aggregation, heuristic_named, judging_stage, scored_again
from clawstream.samples.joining import SampleRules, TeacherRule
from clawstream.samples.stage import samples_stage
from clawstream.stream.avro import codec, headers_of, key_bytes
from clawstream.stream.log import Sealed
from clawstream.stream.runner.fold import Fold
from clawstream.stream.stage import HEARD_MS, Record, Stage
from clawstream.stream.topics import replay_topic, topic_of
from clawstream.turns.stage import turns_stage

EXPIRE_EVERY = 1000  # records
_ALL = 2**63 - 1  # the committable offset of each topic: nothing is read again here


class Output:
    """Makes records of events, counts them by type, and keeps each sample's digest (by sample id, the first counts)."""

    def __init__(self, replay: str) -> None:
        self._replay = replay
        self._source = f"/clawstream/replay/{replay}"
        self._topics: dict[type[Event], str] = {}
        self.counts: Counter[str] = Counter()
        self.digests: dict[bytes, bytes] = {}  # a sample's id -> the sha256 of its bytes

    def record(self, event: Event, *, at_ms: int, traceparent: str | None) -> Sealed:
        """Return the event's record for the topic that the replay has in place of the live one.

        `at_ms` is the time of the record that the event follows from. Raises UnusableEvent for an event that can't be
        encoded.
        """
        kind = type(event)
        value = codec().encode(event)
        headers = headers_of(event, source=self._source, now_ms=at_ms, traceparent=traceparent)
        self.counts[kind.__name__] += 1
        if kind is SampleAssembled:
            event_id = uuid.UUID(dict(headers)["ce_id"].decode("ascii"))
            self.digests.setdefault(event_id.bytes, hashlib.sha256(value).digest())
        if kind not in self._topics:
            self._topics[kind] = replay_topic(topic_of(kind), self._replay)
        return Sealed(self._topics[kind], key_bytes(event.key), value, tuple(headers))


def samples_sha256(digests: Mapping[bytes, bytes]) -> str:
    """Return the sha256 over the samples' digests, in the order of their ids."""
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


class FoldOutput(NamedTuple):
    """What follows from one record: events, in order, and calls; and how many steps could not use their record."""

    events: list[Event]
    calls: list[Any]
    num_unusable: int


class Host:
    """All folds of one partition number, with their sessions' states."""

    def __init__(self, stages: Sequence[Stage[Any, Any]]) -> None:
        self._folds = [Fold(stage) for stage in stages]
        self._readers: dict[str, list[Fold[Any, Any]]] = {}  # of each topic
        for stage, fold in zip(stages, self._folds, strict=True):
            for topic in stage.reads:
                self._readers.setdefault(topic, []).append(fold)
        self._committable = MappingProxyType({topic: _ALL for stage in stages for topic in stage.reads})
        self._num_fed = 0

    def feed(self, record: Record, *, open_since_ms: int | None = None) -> FoldOutput:
        """Apply the record to every fold that reads its topic, and the resulting events to the folds that read them.

        `open_since_ms` is the time of the oldest record with open calls: no state is dropped that was in use then.
        """
        self._num_fed += 1
        if self._num_fed % EXPIRE_EVERY == 0:
            now_ms = record.timestamp_ms if open_since_ms is None else min(open_since_ms, record.timestamp_ms)
            for fold in self._folds:
                fold.expire(now_ms, self._committable)
        events: list[Event] = []
        calls: list[Any] = []
        num_unusable = 0
        waiting = deque([record])
        while waiting:
            current = waiting.popleft()
            for fold in self._readers[current.topic]:
                try:
                    step = fold.apply(current)
                except UnusableEvent:
                    num_unusable += 1
                    continue
                calls += step.calls
                for event in step.events:
                    events.append(event)
                    topic = topic_of(type(event))
                    if topic in self._readers:
                        waiting.append(following(record, topic, event))
        return FoldOutput(events, calls, num_unusable)


def following(cause: Record, topic: str, event: Event) -> Record:
    """Return `event` as a record of `topic`, with the time of the record that it follows from."""
    return Record(
        topic=topic,
        partition=cause.partition,
        offset=cause.offset,
        timestamp_ms=cause.timestamp_ms,
        key=event.key,
        event=event,
        traceparent=cause.traceparent,
    )


def judge_settings(settings: JudgeSettings, started: ReplayStarted) -> JudgeSettings:
    """Return the settings, with the values that `started` holds in place of the present ones."""
    return settings.model_copy(update={"votes": started.num_votes, "hint_quorum": started.hint_quorum})


def hosted(
    settings: Settings, started: ReplayStarted, renderer: Renderer, judge: Judge | None
) -> tuple[Callable[[], Sequence[Stage[Any, Any]]], Stage[Any, Any] | None]:
    """Return the function that makes one partition's stages, and the judging stage (None: no judge is asked)."""
    section = judge_settings(settings.judge, started)
    asks = None if started.teacher is None else TeacherRule(started.teacher, waits=False)
    rules = SampleRules(
        renderer, started.reward_weights, asks=asks,
        judged=started.judged, grouped=started.grouped, interrupted=settings.samples.interrupted, learns=started.learns,
    )  # fmt: skip
    scored_by = [] if started.heuristic_function is None else [heuristic_named(started.heuristic_function)]
    asking = None
    if started.votes_from is VotesFrom.NEW:
        assert judge is not None, f"replay {started.replay} asks a judge, and there is none"
        asking = judging_stage(section, judge, learns=started.learns)

    def stages() -> Sequence[Stage[Any, Any]]:
        turns: list[Stage[Any, Any]] = [turns_stage(), *map(scored_again, scored_by)]
        if started.grouped:
            turns.append(trajectories_stage(retain_ms=HEARD_MS))
        if asking is not None:
            return (*turns, asking, samples_stage(rules))
        # Here the samples stage forgets no session, since on the log another judge may have voted on it much later.
        return (*turns, aggregation(section, started.judge), samples_stage(rules, forgets=False))

    return stages, asking
