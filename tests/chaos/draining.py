"""After the load: until nothing is left to do, and then what there is to see."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aiokafka.errors import KafkaError

from clawstream.errors import PartUnavailable, TryLater
from clawstream.events import BatchPlanned, SampleAssembled, StepRejected, StepTaken
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Commit, PartitionId
from clawstream.stream.stage import Record
from clawstream.stream.topics import POLICY, SAMPLES
from tests.chaos import reading
from tests.chaos.clients import Tally
from tests.chaos.installation import InstallationUnderTest
from tests.chaos.oracle import Collected

_LOOK_EVERY_S = 1.0
_TRAINED = (SAMPLES, POLICY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """The log when nothing was left to do, or when nothing moved any more."""

    left: str  # empty: nothing
    records: Sequence[Record]
    undecodable: Sequence[str]
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Progress:
    """What changes while anything is done at all."""

    ends: dict[PartitionId, int]
    committed: dict[str, dict[PartitionId, Commit]]
    spooled_bytes: dict[str, int]


async def drained(installation: InstallationUnderTest, stages: frozenset[str], *, patience_s: float) -> Drained:
    """Return when nothing is left to do, or nothing has moved for `patience_s`."""
    began_s = moved_s = time.monotonic()
    before: _Progress | None = None
    while True:
        left, progress = "the log can't be read", before
        with contextlib.suppress(TryLater, PartUnavailable, KafkaError):
            async with KafkaLog.connect(installation.bootstrap, client_id="chaos-drain") as log:
                progress = await _progress(installation, log, stages)
                left = await _left(log, progress, stages)
        now_s = time.monotonic()
        if progress != before:
            moved_s, before = now_s, progress
        if not left or now_s - moved_s > patience_s:
            async with KafkaLog.connect(installation.bootstrap, client_id="chaos-drain") as log:
                records, bad = await reading.everything(log)
            return Drained(left=left, records=records, undecodable=bad, took_s=now_s - began_s)
        await asyncio.sleep(_LOOK_EVERY_S)


async def _progress(installation: InstallationUnderTest, log: KafkaLog, stages: frozenset[str]) -> _Progress:
    committed = {group: await log.committed(group) for group in reading.GROUPS if group in stages}
    topics = {place.topic for commits in committed.values() for place in commits}
    spools = (installation.settings.data_dir / "spool").glob("*.spool")
    return _Progress(
        ends=await log.end_offsets(sorted({*topics, *reading.TOPICS})),
        committed=committed,
        spooled_bytes={path.name: path.stat().st_size for path in spools if path.stat().st_size},
    )


async def _left(log: KafkaLog, progress: _Progress, stages: frozenset[str]) -> str:
    """Return what is left to do; empty: nothing. The rig's loop carries every byte, so the log is read seldom."""
    behind = {
        group: sum(max(0, progress.ends[place] - commit.offset) for place, commit in commits.items())
        for group, commits in progress.committed.items()
    }
    left = [f"{name} holds {size} bytes" for name, size in progress.spooled_bytes.items()]
    left += [f"{group} is {lag} behind" for group, lag in behind.items() if lag]
    left += [f"{group} has read nothing" for group, commits in progress.committed.items() if not commits]
    if "train" in stages and not left:
        records, _ = await reading.everything(log, _TRAINED)
        left += _untrained(records)
    return "; ".join(left)


def _untrained(records: Sequence[Record]) -> list[str]:
    events = [record.event for record in records]
    samples = {event.event_id for event in events if isinstance(event, SampleAssembled)}
    plans = [event for event in events if isinstance(event, BatchPlanned)]
    waiting = samples - {name for plan in plans for name in plan.sample_ids}
    steps = {event.policy_version for event in events if isinstance(event, (StepTaken, StepRejected))}
    pending = {plan.policy_version for plan in plans} - steps
    return [f"{len(some)} {what}" for some, what in ((waiting, "samples wait"), (pending, "steps are due")) if some]


async def collected(
    installation: InstallationUnderTest, stages: frozenset[str], tally: Tally, end: Drained
) -> Collected:
    """Return what there is to see of a run that came to its end."""
    found = Collected(
        seen=tuple(tally.seen),
        records=end.records,
        undecodable=end.undecodable,
        manifests=await asyncio.to_thread(reading.manifests, installation.settings.checkpoints_dir),
        moved=tuple(await reading.moved(installation.bootstrap)) if stages.intersection(reading.GROUPS) else (),
        failed=tuple(tally.failed),
        stages=stages,
    )
    if "project" not in stages:
        return found
    audit = await reading.audited(next(iter(installation.parts.values())).config)
    rows = await asyncio.to_thread(reading.rows, installation.database.url)
    twice = await asyncio.to_thread(reading.marked_twice, installation.database.url)
    return replace(found, rows=rows, rows_differ=audit.rows_differ, chain_breaks=audit.chain_breaks, marked_twice=twice)
