"""The samples that a policy is trained on: live ones, the promoted replay's, or, in a retraining, one replay's.

Reading begins where the newest executed plan ends, or at a lower bookmark. So samples of plans that are still to be
executed are read again. A reason is logged when 1, 2, 4, 8 ... samples were dropped for it, so that the lines stay few
however many samples come.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from clawstream.config import Settings
from clawstream.errors import ConfigError
from clawstream.events import (
    BatchPlanned,
    GroupSettled,
    PolicyEvent,
    PolicyPublished,
    RefreshAsked,
    ReplayStarted,
    RollbackAsked,
    SampleAssembled,
    SamplesPromoted,
    VersionPinned,
    key_of_policy,
)
from clawstream.events.control import promotions
from clawstream.inference.model_folder import version_name
from clawstream.stream import topics
from clawstream.stream.log import Arrived, Log, PartitionId, Undecodable, of_policy
from clawstream.stream.stage import HEARD_MS, Record
from clawstream.stream.topics import replay_topic
from clawstream.training.batches.bookmark import Bookmark, Horizon
from clawstream.training.batches.choosing import Arrival, BatchRules
from clawstream.training.batches.planning import Batcher, DropReason
from clawstream.training.batches.progress import PolicyProgress, publication, resume_offsets
from clawstream.training.batches.quarantine import TrainingQuarantine
from clawstream.training.batches.trainable import ModelLimits
from clawstream.training.checkpoints import Checkpoint, resumable

LOST = frozenset({DropReason.STALE, DropReason.UNGROUPED, DropReason.LEFT_OUT, DropReason.UNSETTLED})
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraining:
    """The replay whose samples a separate policy is trained on, and the version that this policy starts from."""

    replay: str
    of: str  # the policy that gave the samples' answers, and whose version training starts from
    from_version: int  # 0: the base
    start: Path | None  # the checkpoint of `from_version`; None: the base


def retraining(settings: Settings, *, replay: str, from_version: int) -> tuple[Settings, Retraining]:
    """Return the settings of the policy POLICY-REPLAY and its retraining; its versions count on from the start version.

    A sample is used however old it is: its recorded log-probs say how much it weighs. Raises UnusableCheckpoint where
    the start version is not on disk any more.
    """
    start = settings.checkpoints_dir / version_name(from_version) if from_version else None
    if start is not None:
        resumable(start, contents=False)
    own = settings.of_policy(f"{settings.policy.id}-{replay}")
    training = settings.training.model_copy(update={"max_versions_behind": None})
    what = Retraining(replay=replay, of=settings.policy.id, from_version=from_version, start=start)
    return own.model_copy(update={"training": training}), what


def policies_of(records: Iterable[Arrived]) -> set[str]:
    """Return the policies that the records are of."""
    events = [record.event for record in records if isinstance(record, Record)]
    return {event.policy_id for event in events if isinstance(event, PolicyEvent | SampleAssembled)}


def first_publication(policy_id: str, base: Path, start: Checkpoint | None, *, now_ms: int) -> PolicyPublished:
    """Return the event that says what a policy starts from: the base, or a version of another policy."""
    if start is not None:
        return replace(publication(start, now_ms=now_ms, policy_id=policy_id), parent_version=None)
    return PolicyPublished(
        policy_id=policy_id,
        policy_version=0,
        parent_version=None,
        path=str(base.absolute()),
        adapter=None,
        manifest_sha256=None,
        num_bytes=sum(file.stat().st_size for file in base.iterdir() if file.is_file()),
        published_at_ms=now_ms,
    )


WHY: Mapping[DropReason, str] = MappingProxyType(
    {
        DropReason.LATE: "another revision of their turns is trained on already (training.late)",
        DropReason.SUPERSEDED: "a newer revision of their turns came",
        DropReason.STALE: "they are more than training.max_versions_behind versions old",
        DropReason.OVERTAKEN: "they rehearse hints, and were answered more than one version ago",
        DropReason.RETIRED: "they rehearse hints that are held no more (`clawstream hints list`)",
        DropReason.NO_SIGNAL: "they have nothing that training.method learns from, or w_binary is 0",
        DropReason.OTHER_POLICY: "another policy than policy.id gave the answers",
        DropReason.UNGROUPED: "they are of no group, and training.method = 'stepwise' learns from groups alone",
        DropReason.LEFT_OUT: "their groups were settled without them",
        DropReason.UNSETTLED: "their groups were not settled in time",
    }
)  # no words for REPEATED, as the first record counts, nor for UNTRAINABLE, as its dead letter says why


def grown(dropped: Mapping[DropReason, int], logged: Counter[DropReason]) -> dict[DropReason, int]:
    """Return the counts that are at least twice the number last logged, for the reasons in `WHY`."""
    return {reason: number for reason in WHY if (number := dropped.get(reason, 0)) >= max(1, 2 * logged[reason])}


class Following:
    """Reads samples into a batcher, which is replaced each time the source of samples changes."""

    batcher: Batcher

    def __init__(
        self, settings: Settings, training_log: Log, progress: PolicyProgress, retraining: Retraining | None,
        limits: ModelLimits, *, arrived: asyncio.Event, quarantine: TrainingQuarantine,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._log = training_log
        self._progress = progress
        self._retraining = retraining
        self._limits = limits
        self._promoted: list[SamplesPromoted] = []
        self._grouped_replays: set[str] = set()
        self.rollbacks: list[RollbackAsked] = []
        self.pins: list[VersionPinned] = []
        self.replay: str | None = None  # the replay whose samples are read; None: the live ones
        self.all_read = False  # True: a retraining has read its replay to the end
        self.found: set[str] = set()  # the policies that gave the answers of the samples read so far
        self._arrived = arrived
        self._one_asking = asyncio.Lock()
        self._logged: Counter[DropReason] = Counter()  # by reason, the number last logged
        self.reading: list[asyncio.Task[None]] = []
        self.keeping: list[asyncio.Task[None]] = []  # writes the bookmark while the next step is taken
        self._quarantine = quarantine
        self._positions: dict[tuple[str, int], int] = {}  # by partition: the next offset to read; empty: not known yet
        self._ends: Mapping[PartitionId, int] = {}  # the log's ends when reading began
        self._bookmark = Bookmark(settings.policy.id, training_log)

    @property
    def wanted(self) -> str | None:
        """The replay whose samples are to be trained on from the next plan on; None: the live ones."""
        if self._retraining is not None:
            return self._retraining.replay
        standing = promotions(self._promoted)
        return standing[-1].replay if standing else None

    @property
    def is_live(self) -> bool:
        """Whether the samples that are read are those of the policy that engines serve."""
        return self._retraining is None and self.replay is None

    async def read_promotions(self, *, until_end: bool) -> None:
        """Read which samples are promoted, which rollbacks are asked for, and which versions are pinned."""
        async for records in self._log.follow([topics.CONTROL], "earliest", until_end=until_end):
            events = of_policy(records, self._settings.policy.id)
            started = [record.event for record in records if isinstance(record, Record)]
            self._grouped_replays |= {one.replay for one in started if isinstance(one, ReplayStarted) and one.grouped}
            self._promoted += [event for event in events if isinstance(event, SamplesPromoted)]
            self.rollbacks += [event for event in events if isinstance(event, RollbackAsked)]
            self.pins += [event for event in events if isinstance(event, VersionPinned)]
            self._arrived.set()

    def turn_to(self, replay: str | None, *, executed_version: int) -> None:
        """Train on the samples of `replay` (None: the live ones) from now on; the waiting ones are read again later."""
        if replay is not None and self._is_grouped and replay not in self._grouped_replays:
            raise ConfigError(
                f"training.method = 'stepwise' learns from groups, and replay {replay} was begun under another method, "
                "so it settled none. Nothing is trained. Set the method that it was begun under, replay "
                "the log again under a new name, or promote the live samples"
            )
        if replay is not None and self._settings.policy.by_key and self._retraining is None:
            raise ConfigError(
                f"replay {replay} is promoted, and policy.adapters is {self._settings.policy.adapters!r}: its samples "
                "are of all adapters, and would train the shared policy alone. Nothing is trained. Take the promotion "
                "back (`clawstream replay rollback`), or train a policy of its own on it (`clawstream train --samples`)"
            )
        for task in self.reading:
            task.cancel()
        of = self._settings.policy.id if self._retraining is None else self._retraining.of
        self.replay = replay
        these = rules(self._settings, of=of, limits=self._limits)
        if self._retraining is not None:
            these = replace(these, of_keys_too=self._settings.policy.by_key)
        if not self.is_live:
            these = replace(these, refreshes=False, corrects=False)  # engines serve only the live samples' policy
        self.batcher = Batcher(
            these, self._progress.plans, executed_version=executed_version, rejected=self._progress.rejected
        )
        self._logged.clear()
        self.all_read = False
        self._positions = {}
        self.reading.append(asyncio.create_task(self._read(self._topics, self.batcher, executed_version)))
        log.info("samples_from replay=%s version=%d", replay, executed_version)

    async def rule(self) -> None:
        """Carry out what people decided about dead letters, and ask for new answers to late samples' prompts."""
        await self._quarantine.rule(self._topic, self.batcher)
        await self.ask_again()

    async def ask_again(self) -> None:
        """Write to the log which prompts of late samples are to be answered again, each once."""
        async with self._one_asking:
            batcher = self.batcher
            late = batcher.to_refresh()
            if late:
                await self._log.append([_refresh(arrival) for arrival in late])
                batcher.asked(late)

    def tell_dropped(self) -> None:
        """Log how many of the samples read so far were dropped, and why."""
        told = self.batcher.dropped
        if self._settings.policy.by_key:  # most samples are of other keys
            told = Counter({reason: n for reason, n in told.items() if reason is not DropReason.OTHER_POLICY})
        for reason, number in grown(told, self._logged).items():
            level = logging.WARNING if reason in LOST else logging.INFO
            log.log(level, "samples_dropped=%d trained=never reason=%s", number, WHY[reason])
            self._logged[reason] = number

    async def executed(self, plan: BatchPlanned, *, rejected: bool = False) -> None:
        """Note that the plan's step is taken or rejected: its samples are used up, and the bookmark moves on."""
        self.batcher.executed(plan, rejected=rejected)
        while self.keeping:
            await self.keeping.pop()
        self.keeping.append(asyncio.create_task(self._bookmark.keep(self._topics, plan)))

    def is_past(self, plan: BatchPlanned) -> bool:
        """Return whether the log is read up to the plan's offsets, so that samples missing by now never come."""
        ends = {PartitionId(o.topic, o.partition): o.next_offset for o in plan.offsets if o.topic == self._topic}
        return bool(ends) and all(
            self._positions.get(place, -1) >= min(end, self._ends.get(place, end)) for place, end in ends.items()
        )

    @property
    def _is_grouped(self) -> bool:
        return self._settings.training.method == "stepwise"

    @property
    def _topic(self) -> str:
        return topics.SAMPLES if self.replay is None else replay_topic(topics.SAMPLES, self.replay)

    @property
    def _topics(self) -> list[str]:
        if not self._is_grouped:
            return [self._topic]
        return [self._topic, topics.GROUPS if self.replay is None else replay_topic(topics.GROUPS, self.replay)]

    async def _read(self, topics: Sequence[str], batcher: Batcher, executed_version: int) -> None:
        await self._quarantine.current.wait()
        stopped = await self._bookmark.stopped(topics, self._progress.plans, executed_version)
        executed = resume_offsets(self._progress.plans, executed_version)
        batcher.read_again({place: offset for place, offset in stopped.items() if offset < executed[place]})
        start = self._start(await self._log.begin_offsets(topics), stopped)
        self._ends = await self._log.end_offsets(topics)
        self._positions = dict(start)
        self._arrived.set()
        horizon = Horizon(topics, self._log) if self._is_grouped else None
        await self._look_ahead(horizon, (), batcher)
        async for records in self._log.follow(topics, start, until_end=self._retraining is not None):
            settled: list[str] = []
            for record in records:
                if record.topic == topics[0]:
                    await self._quarantine.receive(record, batcher)
                    self.found |= policies_of([record])
                else:
                    settled += _settle(record, batcher)
                self._positions[PartitionId(record.topic, record.partition)] = record.offset + 1
            await self._look_ahead(horizon, settled, batcher)
            await self.ask_again()
            self._arrived.set()
        self.all_read = True
        self._arrived.set()

    async def _look_ahead(self, horizon: Horizon | None, settled: Sequence[str], batcher: Batcher) -> None:
        """Tell the batcher which settled groups get no more samples, as the log is read past their settlements."""
        passed = None if horizon is None else await horizon.passed(settled, self._positions)
        if passed is not None:
            batcher.read_past(passed)

    def _start(
        self, begins: Mapping[PartitionId, int], executed: Mapping[PartitionId, int]
    ) -> dict[tuple[str, int], int]:
        """Return where to read from; log each partition whose beginning lies after the newest executed plan's end."""
        for place, begin in begins.items():
            # A key's newest plan may be old because nothing was said under the key since: then no sample is missing.
            if executed.get(place, begin) < begin and key_of_policy(self._settings.policy.id) is None:
                log.warning(
                    "samples_unread partition=%s-%s from=%d to=%d reason=past the topic's retention",
                    *place, executed[place], begin,
                )  # fmt: skip
        return {place: max(begin, executed.get(place, begin)) for place, begin in begins.items()}


def _refresh(late: Arrival) -> RefreshAsked:
    sample = late.sample
    return RefreshAsked(
        session_id=sample.session_id,
        turn_id=sample.turn_id,
        sample_id=sample.sample_id,
        policy_id=sample.policy_id,
        prompt_ids=sample.prompt_ids,
        sampling=sample.sampling,
        asked_at_ms=late.timestamp_ms,
    )


def _settle(record: Arrived, batcher: Batcher) -> list[str]:
    """Tell the batcher of a settlement; return its group's id."""
    if isinstance(record, Undecodable):
        log.error(
            "record=%s-%d-%d state=passed_over reason=%s", record.topic, record.partition, record.offset, record.reason
        )
    elif isinstance(record.event, GroupSettled):
        batcher.learn(record.event, record.timestamp_ms)
        return [record.event.group_id]
    return []


def rules(settings: Settings, *, of: str, limits: ModelLimits) -> BatchRules:
    """Return when a batch is made and from what, as the settings say; `of` names the policy that answered."""
    training = settings.training
    grouped = training.method == "stepwise"
    w_binary, w_opd = training.weights
    return BatchRules(
        policy_id=of,
        batch_samples=training.batch_samples,
        max_wait_ms=round(training.max_wait_s * 1000),
        max_versions_behind=training.max_versions_behind,
        rewards_count=w_binary > 0,
        hints_count=w_opd > 0,
        by_engine=training.by_engine,
        grouped=grouped,
        refreshes=training.late == "refresh",
        rehearses=training.rehearsed_share > 0,
        max_unsettled_ms=HEARD_MS + round(training.group_wait_s * 1000) if grouped else None,
        limits=limits,
        corrects=training.corrects,
    )
