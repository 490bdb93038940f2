"""Groups that have read further than the log goes, or other records than it has: they are found, and put back.

The one rule: a person says that the log is right; then a stage goes on from the first record that was appended after
its clock stood still. What it does twice comes to the same events.
"""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from clawstream.stream.ends import Contradiction, contradictions
from clawstream.stream.log import Commit, Log, Place, Start
from clawstream.stream.records import digest_in
from clawstream.stream.runner.fold import CLOCK_SLACK_MS
from clawstream.stream.runner.rebuild import Note, read_note

TRUST_LOG = (
    "where this log is the right one, stop the stages and run `clawstream projection rebuild --trust-log`, which puts "
    "them back to where it was cut"
)


class Groups(Log, Protocol):
    """A log whose groups can be told where they stand."""

    async def committed(self, group: str, topics: Sequence[str] | None = None) -> dict[Place, Commit]:
        """Return how far the group has come where it has read anything."""

    async def offsets_at(self, topics: Sequence[str], start: Start) -> dict[Place, int]:
        """Return the first offset of each partition at `start`."""

    async def put_back(self, group: str, commits: Mapping[Place, Commit]) -> None:
        """Let the group go on from these; raises PartUnavailable while somebody reads in it."""


async def contradicted(
    log: Log, committed: Mapping[Place, Commit | None], begins: Mapping[Place, int]
) -> list[Contradiction]:
    """Return the partitions that are not as they were when they were committed."""
    commits = {place: commit for place, commit in committed.items() if commit is not None and commit.offset > 0}
    if not commits:
        return []
    ends = await log.end_offsets(sorted({place.topic for place in commits}))
    notes = {place: read_note(commit.note, commit.offset) for place, commit in commits.items()}
    last = {place: note.last for place, note in notes.items() if note.last is not None}
    there = {
        place: (commits[place].offset - 1, commits[place].offset)
        for place in last
        if begins.get(place, 0) < commits[place].offset <= ends.get(place, 0)
    }
    found = await _digests(log, there) if there else {}
    return contradictions({place: commit.offset for place, commit in commits.items()}, ends, last, found)


async def _digests(log: Log, at: Mapping[Place, tuple[int, int]]) -> dict[Place, str]:
    """Return the digest of each partition's record there, where it still has one."""
    found: dict[Place, str] = {}
    async with aclosing(log.replay(at)) as reading:
        async for records in reading:
            for record in records:
                digest = digest_in(record)
                if digest is not None:
                    found[Place(record.topic, record.partition)] = digest.hex()
    return found


async def put_back(log: Groups, group: str) -> list[Contradiction]:
    """Let the group go on from where the log was cut; return the partitions of which that was done.

    Raises PartUnavailable while a member of the group reads.
    """
    committed = await log.committed(group)
    if not committed:
        return []
    wrong = await contradicted(log, committed, await log.begin_offsets(sorted({place.topic for place in committed})))
    commits: dict[Place, Commit] = {}
    for one in wrong:
        note = read_note(committed[one.place].note, one.offset)
        found = await log.offsets_at([one.place.topic], max(0, note.clock_ms - CLOCK_SLACK_MS))
        start = min(found[one.place], one.offset)
        again = Note(min(note.rebuild_from, start), note.clock_ms)
        commits[one.place] = Commit(start, again.written())
    if commits:
        await log.put_back(group, commits)
    return wrong
