"""A log that lost its end, or another log: no stage passes over what was written there since, on either log."""

import asyncio
import json

import pytest

from clawstream.errors import LogContradicted, PartUnavailable
from clawstream.stream.log import Commit, PartitionId
from clawstream.stream.runner.hosting import run
from clawstream.stream.runner.offset_reset import put_back
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.stream.contract.conftest import AnyLog
from tests.unit.stream import toys


async def started(log: AnyLog) -> None:
    """Run the stage until it ends by itself."""
    async with asyncio.timeout(20):
        await run(toys.pairs(), log, stop=asyncio.Event(), pace=toys.HASTE)


async def settled(log: AnyLog, sessions: str, numbers: range) -> dict[PartitionId, Commit]:
    """Write records of the sessions and let the stage read them."""
    await log.append([toys.done(session, number) for number in numbers for session in sessions])
    async with toys.running(toys.pairs(), log):
        await toys.settled(log, "pairs")
    return await log.committed("pairs")


async def test_a_stage_that_has_read_further_than_the_log_goes_is_refused_and_put_back_on_a_persons_word(
    log: AnyLog,
) -> None:
    commits = await settled(log, "a", range(4))
    [place] = [place for place, commit in commits.items() if commit.offset == 4]
    await log.put_back("pairs", {place: Commit(6, commits[place].note)})
    with pytest.raises(LogContradicted, match=r"was read up to offset 6 and ends at 4.*rebuild --trust-log"):
        await started(log)
    assert (await log.committed("pairs"))[place].offset == 6
    [wrong] = await put_back(log, "pairs")
    assert (wrong.place, wrong.offset, wrong.end) == (place, 6, 4)
    assert (await log.committed("pairs"))[place].offset <= 4
    await settled(log, "a", range(4, 7))
    assert await toys.written(log, toys.TURNS) == toys.ids(toys.paired("a", number) for number in range(6))
    assert await put_back(log, "pairs") == []


async def test_a_log_that_has_another_record_where_the_stage_stopped_is_refused(log: AnyLog) -> None:
    commits = await settled(log, "a", range(4))
    [place] = [place for place, commit in commits.items() if commit.offset == 4]
    other = json.dumps(json.loads(commits[place].note) | {"last": "00" * 16})
    await log.put_back("pairs", {place: Commit(4, other)})
    with pytest.raises(LogContradicted, match="was read up to offset 4 and has another record at 3"):
        await started(log)


async def test_a_commit_of_before_there_were_digests_is_gone_on_from(log: AnyLog) -> None:
    commits = await settled(log, "a", range(4))
    notes = {place: json.loads(commit.note) for place, commit in commits.items() if commit.offset}
    assert all(note.pop("last") for note in notes.values())
    await log.put_back(
        "pairs", {place: Commit(commits[place].offset, json.dumps(note)) for place, note in notes.items()}
    )
    await settled(log, "a", range(4, 7))
    assert await toys.written(log, toys.TURNS) == toys.ids(toys.paired("a", number) for number in range(6))


@pytest.mark.slow
async def test_nobody_is_put_back_under_a_stage_that_runs(log: AnyLog) -> None:
    await log.append([toys.done("a", 0)])
    async with toys.running(toys.pairs(), log):
        await toys.settled(log, "pairs")
        commits = await log.committed("pairs")
        with pytest.raises(PartUnavailable):
            async with asyncio.timeout(20):
                await log.put_back("pairs", {place: Commit(0) for place in commits})


async def test_what_was_written_below_the_old_end_of_a_cut_log_is_read_once_the_log_is_trusted() -> None:
    log = MemoryLog(MemoryBroker(partitions=1))
    await settled(log, "a", range(5))
    place = PartitionId(toys.EXCHANGES, 0)
    del log.broker._partitions[place][-2:]
    await log.append([toys.done("b", number) for number in range(3)])
    with pytest.raises(LogContradicted, match="has another record at 4"):
        await started(log)
    assert len(await put_back(log, "pairs")) == 1
    await settled(log, "b", range(3, 4))
    expected = toys.ids([*(toys.paired("a", n) for n in range(4)), *(toys.paired("b", n) for n in range(3))])
    assert await toys.written(log, toys.TURNS) == expected
