"""What a log promises those who append and follow."""

import asyncio
import time
from collections.abc import Mapping

import pytest

from clawstream.errors import UnusableEvent
from clawstream.events import Event, PolicyPublished
from clawstream.stream.avro import codec
from clawstream.stream.log import Arrived, PartitionId, RecordBatch, Start
from clawstream.stream.stage import Record
from clawstream.stream.topics import POLICY
from tests.fakes.memory_log import MemoryLog
from tests.parts.stream.contract.conftest import AnyLog, Connect
from tests.unit.stream import toys


def event_of(record: Arrived) -> Event:
    assert isinstance(record, Record)
    return record.event


def published(version: int) -> PolicyPublished:
    return PolicyPublished(
        policy_id="p", policy_version=version, parent_version=None, path="/", adapter=None, manifest_sha256=None,
        num_bytes=0, published_at_ms=0,
    )  # fmt: skip


@pytest.mark.slow
async def test_a_session_is_read_in_the_order_in_which_it_was_written(log: AnyLog) -> None:
    events = [toys.done(session, number) for number in range(50) for session in "abcdefgh"]
    await asyncio.gather(*(log.append(events[at : at + 40]) for at in range(0, len(events), 40)))
    read = await toys.read(log, toys.EXCHANGES)
    for session in "abcdefgh":
        assert [toys.number_of(one.event) for one in read if one.key == session] == list(range(50))
    assert len({one.partition for one in read if one.key == "a"}) == 1


@pytest.mark.slow
async def test_a_record_says_where_it_stands_and_which_trace_it_belongs_to(log: AnyLog) -> None:
    before_ms = int(time.time() * 1000)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await log.append([published(0), published(1)], trace)
    first, second = await toys.read(log, POLICY)
    assert (first.topic, first.partition, first.key, first.traceparent) == (POLICY, 0, "p", trace)
    assert first.offset < second.offset
    assert before_ms - 1000 <= first.timestamp_ms <= second.timestamp_ms <= before_ms + 60_000
    assert [first.event, second.event] == [published(0), published(1)]


async def test_all_connections_to_a_broker_know_it_by_one_name(connect: Connect, log: AnyLog) -> None:
    async with connect() as another:
        assert another.cluster_id == log.cluster_id
    assert log.cluster_id
    assert log.cluster_id != MemoryLog().cluster_id


async def test_a_follower_sees_what_comes(log: AnyLog) -> None:
    await log.append([published(0)])
    seen: list[Event] = []
    async with asyncio.timeout(20):
        async for records in log.follow([POLICY]):
            seen += map(event_of, records)
            if seen == [published(0)]:
                await log.append([published(1)])
            elif len(seen) == 2:
                break
    assert seen == [published(0), published(1)]


async def test_a_follower_can_begin_at_an_offset_at_the_end_or_at_a_time(log: AnyLog) -> None:
    await log.append([published(0), published(1)])
    await asyncio.sleep(0.01)  # so that the broker's clock has another millisecond
    await log.append([published(2)])
    third = (await toys.read(log, POLICY))[2]
    for start in ({(POLICY, 0): third.offset}, third.timestamp_ms):
        found = [one async for one in log.follow([POLICY], start, until_end=True)]
        assert [event_of(record) for records in found for record in records] == [published(2)]
    assert [one async for one in log.follow([POLICY], "latest", until_end=True)] == []
    assert [one async for one in log.follow([POLICY], third.timestamp_ms + 60_000, until_end=True)] == []


async def test_partitions_without_a_stated_offset_are_read_whole(log: AnyLog) -> None:
    await log.append([toys.done(session, 0) for session in "abcdefgh"])
    ends = await log.end_offsets([toys.EXCHANGES])
    place = max(ends, key=lambda place: ends[place])
    found = [one async for one in log.follow([toys.EXCHANGES], {place: ends[place]}, until_end=True)]
    assert sum(map(len, found)) == 8 - ends[place]


async def test_an_event_that_can_not_be_written_takes_the_others_of_its_call_with_it(log: AnyLog) -> None:
    too_big = toys.paired("a", 2**63)
    with pytest.raises(UnusableEvent, match=too_big.event_id):
        await log.append([toys.paired("a", 1), too_big])
    assert await toys.read(log, toys.TURNS) == []


async def test_offsets_of_an_empty_topic_are_zero(log: AnyLog) -> None:
    nothing = {PartitionId(toys.TURNS, number): 0 for number in range(3)}
    assert await log.end_offsets([toys.TURNS]) == await log.begin_offsets([toys.TURNS]) == nothing


async def test_a_group_that_never_read_has_no_lag(log: AnyLog) -> None:
    assert await log.lag("nobody") is None
    assert await log.committed("nobody") == {}


async def test_replay_reads_ranges_and_ends(log: AnyLog) -> None:
    await log.append([published(number) for number in range(10)])
    found = [one async for one in log.replay({PartitionId(POLICY, 0): (3, 6)})]
    assert [event_of(record) for records in found for record in records] == [published(n) for n in (3, 4, 5)]
    raws = [raw async for some in log.replay_raw({PartitionId(POLICY, 0): (3, 6)}) for raw in some]
    assert [codec().decode(raw.value) for raw in raws] == [published(n) for n in (3, 4, 5)]
    assert [raw async for some in log.replay_raw({PartitionId(POLICY, 0): (3, 6)}, key=b"nobody") for raw in some] == []


async def test_a_replay_that_keeps_no_chain_hashes_nothing(log: AnyLog) -> None:
    await log.append([published(0)])
    for digest in (True, False):
        found = [one async for one in log.replay({PartitionId(POLICY, 0): (0, 1)}, digest=digest)]
        assert [isinstance(record, Record) and (record.digest is not None) for [record] in found] == [digest]


async def test_records_that_were_put_stand_in_order_on_the_partitions_that_were_chosen(log: AnyLog) -> None:
    events = [toys.done("one key", number) for number in range(600)]
    for partition in range(3):
        await log.put([log.seal(event) for event in events[partition::3]], partition)
    read = await toys.read(log, toys.EXCHANGES)
    for number in range(3):
        assert [record.event for record in read if record.partition == number] == events[number::3]


@pytest.mark.slow
async def test_many_who_put_on_one_partition_at_once_are_all_acknowledged(log: AnyLog) -> None:
    sealed = [log.seal(toys.done("one key", number)) for number in range(600)]
    await asyncio.gather(*(log.put([one], 0) for one in sealed))
    assert len(await toys.read(log, toys.EXCHANGES)) == 600


async def test_offsets_are_told_of_a_time_of_either_end_and_of_what_was_said(log: AnyLog) -> None:
    await log.append([published(0), published(1)])
    await asyncio.sleep(0.01)  # so that the broker's clock has another millisecond
    await log.append([published(2)])
    third = (await toys.read(log, POLICY))[2]
    place = PartitionId(POLICY, 0)
    starts: list[tuple[Start, int]] = [
        ("earliest", 0),
        ("latest", 3),
        ({place: 1}, 1),
        ({}, 0),
        (third.timestamp_ms, 2),
        (third.timestamp_ms + 60_000, 3),
        (0, 0),
    ]
    for start, offset in starts:
        assert await log.offsets_at([POLICY], start) == {place: offset}, start


async def test_a_subscriber_reads_from_where_its_own_offsets_say(log: AnyLog) -> None:
    await log.append([published(number) for number in range(5)])

    async def kept_offsets(places: frozenset[PartitionId]) -> Mapping[PartitionId, int]:
        return dict.fromkeys(places, 2)

    seen: list[RecordBatch] = []
    async with asyncio.timeout(20):
        async for batch in log.subscribe([POLICY], "kept", start=kept_offsets):
            seen.append(batch)
            if batch.next_offset == 5:
                break
    assert [event_of(record) for batch in seen for record in batch.records] == [published(n) for n in (2, 3, 4)]


async def test_what_a_subscriber_took_is_noted_with_its_group(log: AnyLog) -> None:
    await log.append([published(0)])

    async def kept_offsets(places: frozenset[PartitionId]) -> Mapping[PartitionId, int]:
        return dict.fromkeys(places, 0)

    async def take() -> None:
        async for _ in log.subscribe([POLICY], "notes", start=kept_offsets):
            pass

    taking = asyncio.create_task(take())
    await toys.settled(log, "notes")
    await log.append([published(1)])
    await toys.settled(log, "notes")
    taking.cancel()
    await asyncio.wait([taking])
    assert (await log.committed("notes", [POLICY]))[PartitionId(POLICY, 0)].offset == 2


async def test_a_connection_that_stands_is_healthy(log: AnyLog) -> None:
    assert log.healthy()
