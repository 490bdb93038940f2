"""Finds groups that read further than the log now reaches, or other records than it now has, and puts them back.

The one rule: a person decides that the log is right. Then the stage goes on from the first record that was appended
after the log's time in the note of its last commit. Records that it reads twice give the same events.
"""

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass

from clawstream.errors import LogContradicted
from clawstream.stream.log import Arrived, Commit, Log, PartitionId, digest_in, past_the_end
from clawstream.stream.runner.fold import CLOCK_SLACK_MS, Note, read_note

TRUST_LOG = (
    "or, if this log is the right one, stop the stages and run `clawstream projection rebuild --trust-log`, which puts "
    "the stages back to where the log was cut"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """A partition that changed since it was read up to `offset`."""

    place: PartitionId
    offset: int
    end: int

    def __str__(self) -> str:
        found = f"ends at {self.end}" if self.end < self.offset else f"has another record at {self.offset - 1}"
        return f"{self.place.topic} partition {self.place.partition} was read up to offset {self.offset} and {found}"


async def contradicted(
    log: Log, committed: Mapping[PartitionId, Commit | None], begins: Mapping[PartitionId, int]
) -> list[Contradiction]:
    """Return the partitions that now end before the group's offset, or have another record before it.

    It is no contradiction if the record before the offset is past its topic's retention.
    """
    commits = {place: commit for place, commit in committed.items() if commit is not None and commit.offset > 0}
    if not commits:
        return []
    ends = await log.end_offsets(sorted({place.topic for place in commits}))
    notes = {place: read_note(commit.note, commit.offset) for place, commit in commits.items()}
    last = {place: note.last for place, note in notes.items() if note.last is not None}
    found = await last_records(log, {place: commits[place].offset for place in last}, begins, ends)
    digests = {place: digest.hex() for place, one in found.items() if (digest := digest_in(one)) is not None}
    offsets = {place: commit.offset for place, commit in commits.items()}
    wrong = {place for place, digest in last.items() if digests.get(place, digest) != digest}
    wrong |= set(past_the_end(offsets, ends))
    return [
        Contradiction(place=place, offset=offset, end=ends.get(place, 0))
        for place, offset in offsets.items()
        if place in wrong
    ]


async def last_records(
    log: Log, offsets: Mapping[PartitionId, int], begins: Mapping[PartitionId, int], ends: Mapping[PartitionId, int]
) -> dict[PartitionId, Arrived]:
    """Return the record before each partition's offset, where the log still has one, with its digest."""
    at = {
        place: (offset - 1, offset)
        for place, offset in offsets.items()
        if begins.get(place, 0) < offset <= ends.get(place, 0)
    }
    if not at:
        return {}
    async with aclosing(log.replay(at)) as reading:
        return {PartitionId(one.topic, one.partition): one async for records in reading for one in records}


async def put_back(log: Log, group: str) -> list[Contradiction]:
    """Let the group go on from where the log was cut; return the partitions that were put back.

    Raises PartUnavailable while a member of the group reads.
    """
    committed = await log.committed(group)
    if not committed:
        return []
    wrong = await contradicted(log, committed, await log.begin_offsets(sorted({place.topic for place in committed})))
    commits: dict[PartitionId, Commit] = {}
    for one in wrong:
        note = read_note(committed[one.place].note, one.offset)
        found = await log.offsets_at([one.place.topic], max(0, note.clock_ms - CLOCK_SLACK_MS))
        start = min(found[one.place], one.offset)
        again = Note(min(note.rebuild_from, start), note.clock_ms)
        commits[one.place] = Commit(start, again.written())
    if commits:
        await log.put_back(group, commits)
    return wrong


def refuse(reader: str, wrong: list[Contradiction], remedy: str) -> None:
    """Raise LogContradicted if any partition is `wrong`."""
    if wrong:
        more = f", and {len(wrong) - 1} more partitions" if len(wrong) > 1 else ""
        raise LogContradicted(
            f"{reader}: {wrong[0]}{more}: this is not the log that {reader} read, or it has lost its end. Nothing was "
            f"read: {reader} would skip what was written there since. Name the right broker and prefix; {remedy}"
        )
