"""Where a policy's trainer stopped on the log, and how far it has to read for a group.

A trainer never resumes past the offset where it stopped; the plans say which samples are used up. A group's samples are
written before its settlement. So a reader that asks for the partitions' ends after it has read the settlement finds all
of these samples below the ends.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

from clawstream.errors import PartUnavailable, TryLater
from clawstream.events import BatchPlanned, PolicyEvent
from clawstream.stream import topics
from clawstream.stream.kafka.access import BOOKMARKS
from clawstream.stream.log import Commit, Log, PartitionId, digest_in
from clawstream.stream.runner.fold import Note
from clawstream.stream.runner.offset_reset import TRUST_LOG, Contradiction, contradicted, last_records, put_back, refuse
from clawstream.stream.stage import Record
from clawstream.training.batches.progress import first_plans, resume_offsets

log = logging.getLogger(__name__)


class Bookmark:
    """The place where training stopped: the broker keeps it as the offsets of a consumer group that nobody joins."""

    def __init__(self, policy_id: str, of: Log) -> None:
        self._group = f"{BOOKMARKS}{policy_id}"
        self._log = of

    async def stopped(
        self, topics: Sequence[str], planned: Iterable[BatchPlanned], executed_version: int
    ) -> Mapping[PartitionId, int]:
        """Return where the trainer is to go on; a missing partition is read from its beginning.

        Raises LogContradicted where the log has changed since the plans were made.
        """
        kept = await self._log.committed(self._group, topics)
        executed = _commits(topics, [plan for plan in first_plans(planned) if plan.policy_version <= executed_version])
        unkept = {place: commit for place, commit in executed.items() if place not in kept}
        if unkept:
            await self._log.put_back(self._group, unkept)  # so that `put_trainers_back` finds the group
        begins = await self._log.begin_offsets(topics)
        refuse(self._group, await contradicted(self._log, executed | kept, begins), TRUST_LOG)
        return {place: min(commit.offset, kept.get(place, commit).offset) for place, commit in executed.items()}

    async def keep(self, topics: Sequence[str], plan: BatchPlanned) -> None:
        """Note where an executed plan ends, and the digest of the record before; if this fails, an older one stays."""
        commits = _commits(topics, [plan])
        if not commits:
            return
        try:
            await self._log.put_back(self._group, await _with_digests(self._log, commits))
        except (TryLater, PartUnavailable) as error:
            log.warning("group=%s version=%d noted=no reason=%s", self._group, plan.policy_version, error)


async def put_trainers_back(of: Log) -> dict[str, list[Contradiction]]:
    """Let each policy's trainer go on from where the log was cut; return the partitions put back, by group."""
    policies: set[str] = set()
    ends = await of.end_offsets([topics.POLICY])
    async for records in of.replay({place: (0, end) for place, end in ends.items() if end}, digest=False):
        events = [record.event for record in records if isinstance(record, Record)]
        policies |= {event.policy_id for event in events if isinstance(event, PolicyEvent)}
    groups = [f"{BOOKMARKS}{policy}" for policy in sorted(policies)]
    return {group: await put_back(of, group) for group in groups}


def _commits(topics: Sequence[str], executed: Sequence[BatchPlanned]) -> dict[PartitionId, Commit]:
    """Return where the executed plans, which are in order, end: as commits of a consumer group."""
    if not executed:
        return {}
    return {
        PartitionId(*place): Commit(offset, Note(offset, executed[-1].planned_at_ms).written())
        for place, offset in resume_offsets(executed, executed[-1].policy_version).items()
        if place[0] in topics
    }


async def _with_digests(of: Log, commits: Mapping[PartitionId, Commit]) -> dict[PartitionId, Commit]:
    topics = sorted({place.topic for place in commits})
    begins, ends = await of.begin_offsets(topics), await of.end_offsets(topics)
    offsets = {place: commit.offset for place, commit in commits.items()}
    noted = dict(commits)
    for place, record in (await last_records(of, offsets, begins, ends)).items():
        digest = digest_in(record)
        note = Note(offsets[place], record.timestamp_ms, None if digest is None else digest.hex())
        noted[place] = Commit(offsets[place], note.written())
    return noted


class Horizon:
    """Finds out past which settlements the log is read, by the topics' ends at the start and after settlements."""

    def __init__(self, topics: Sequence[str], log: Log) -> None:
        self._topics = topics
        self._log = log
        self._unsure: list[str] = []  # settled groups for which the ends were not asked yet
        # The ends as last asked for, and the groups whose settlements were read before that.
        self._ahead: tuple[Mapping[PartitionId, int], list[str]] | None = None
        self._begun = False

    async def passed(self, settled: Iterable[str], positions: Mapping[tuple[str, int], int]) -> list[str] | None:
        """Return the settled groups that now turn out to have no unread samples; None: the ends are not reached yet.

        `positions` are the next offsets to read.
        """
        self._unsure += settled
        found: list[str] | None = None
        while self._ahead is not None or self._unsure or not self._begun:
            if self._ahead is None:
                self._ahead = await self._log.end_offsets(self._topics), self._unsure
                self._unsure, self._begun = [], True
            ends, groups = self._ahead
            if any(positions.get(place, 0) < end for place, end in ends.items()):
                break
            found = [*(found or []), *groups]
            self._ahead = None
        return found
