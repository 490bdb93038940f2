"""Events are shown as people read them, whatever they say."""

import asyncio
import io
import json
import time
from collections.abc import AsyncGenerator, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.errors import OperatorError
from clawstream.events import Event, HintRetired, Retired
from clawstream.projections.look.summaries import MAX_WORDS, as_dict, line
from clawstream.projections.look.tail import as_line, in_time_order, start_ms, tail, tail_options
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Arrived, PartitionId, Undecodable
from tests.parts.projections import one_session
from tests.parts.projections.one_memory import held
from tests.unit.projections import logs

NOW_MS = 1_763_647_200_000


@given(logs.events())
def test_any_event_is_one_short_line_that_a_terminal_can_show(fact: Event) -> None:
    [[record]] = logs.records([fact]).values()
    assert line(fact).isprintable()
    assert as_line(record).isprintable()
    line(fact).encode()


@given(logs.events())
def test_any_event_is_json_with_every_field(fact: Event) -> None:
    [[record]] = logs.records([fact]).values()
    found = json.loads(json.dumps(as_dict(record)))
    assert (found["type"], found["event_id"]) == (type(fact).__name__, fact.event_id)
    assert found["event"].keys() == {name for name in fact.__dataclass_fields__ if name != "IDENTITY"}


def test_an_exchange_reads_as_question_and_answer() -> None:
    assert line(one_session.EXCHANGES[1]).endswith('"No bold, please." -> "5"')
    long = logs.example(type(one_session.EXCHANGES[0]), message=one_session.message("assistant", "x" * 10_000))
    assert len(line(long)) < 3 * MAX_WORDS


def test_an_event_without_words_of_its_own_reads_as_its_fields_without_ids_and_times() -> None:
    kept = held("turn", "be brief", "ann")
    expected = 'hint "be brief", hint_by_person False, key_name "ann", prompt_ids (2), hinted_prompt_ids (3)'
    assert line(kept) == f"{expected}, num_earlier_turns 0, policy_version 1, merged False, followed False"
    retired = HintRetired(policy_id="p", hint_id="h", reason=Retired.ASKED, retired_at_ms=1)
    assert line(retired) == "reason asked"


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        ("90s", NOW_MS - 90_000),
        ("5m", NOW_MS - 300_000),
        ("1d", NOW_MS - 86_400_000),
        ("2025-11-20T14:00", NOW_MS),
        ("2025-11-20T15:00+01:00", NOW_MS),
    ],
)
def test_a_time_is_read_in_both_forms(since: str, expected: int) -> None:
    assert start_ms(since, NOW_MS) == expected


@pytest.mark.parametrize("since", ["yesterday", "5 minutes", "-5m", ""])
def test_another_time_is_an_operators_error_that_names_the_forms(since: str) -> None:
    with pytest.raises(OperatorError, match=r"expected how long ago \(90s, 5m, 2h or 1d\), or an ISO time"):
        start_ms(since, NOW_MS)


@pytest.mark.parametrize("topic", ["turns", "clawstream.turns.v1"])
def test_a_topic_goes_by_its_whole_name_or_its_middle_word(topic: str) -> None:
    what = tail_options(topic, session_id=None, since=None, until_end=True, now_ms=NOW_MS)
    assert (what.topic, what.start) == ("clawstream.turns.v1", "earliest")


def test_an_unknown_topic_is_an_operators_error_that_names_those_there_are() -> None:
    with pytest.raises(OperatorError, match=r"no topic 'turn'.*clawstream\.turns\.v1"):
        tail_options("turn", session_id=None, since=None, until_end=True, now_ms=NOW_MS)


async def test_tail_shows_one_sessions_records_and_ends_where_the_topic_ends(log: KafkaLog) -> None:
    other = logs.example(type(one_session.EXCHANGES[0]), session_id="another")
    await log.append([*one_session.EXCHANGES, other])
    for as_json in (False, True):
        out = io.StringIO()
        what = tail_options("exchanges", session_id=one_session.SESSION, since="1h", until_end=True, now_ms=_now_ms())
        await tail(log, what, as_json=as_json, out=out)
        lines = out.getvalue().splitlines()
        assert len(lines) == len(one_session.EXCHANGES)
        assert all(one_session.SESSION in shown for shown in lines)
    assert json.loads(lines[0])["event"]["message"] == json.loads(one_session.ANSWER)


async def test_what_is_there_is_shown_in_the_order_of_time_over_all_partitions(log: KafkaLog) -> None:
    said = [
        logs.example(type(one_session.EXCHANGES[0]), exchange_id=f"x{n}", session_id=f"s{n % 5}") for n in range(20)
    ]
    for event in said:
        await log.append([event])
    out = io.StringIO()
    await tail(
        log,
        tail_options("exchanges", session_id=None, since="1h", until_end=True, now_ms=_now_ms()),
        as_json=True,
        out=out,
    )
    shown = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len({one["partition"] for one in shown}) > 1
    times = [one["timestamp_ms"] for one in shown]
    assert times == sorted(times)
    assert {one["event"]["exchange_id"] for one in shown} == {event.exchange_id for event in said}


async def test_after_what_is_there_comes_what_comes_and_nothing_twice(log: KafkaLog) -> None:
    first, second = (logs.example(type(one_session.EXCHANGES[0]), exchange_id=name, session_id=name) for name in "ab")
    await log.append([first])
    out = io.StringIO()
    what = tail_options("exchanges", session_id=None, since="1h", until_end=False, now_ms=_now_ms())
    showing = asyncio.create_task(tail(log, what, as_json=True, out=out))
    try:
        async with asyncio.timeout(60):
            while not out.getvalue():
                await asyncio.sleep(0.02)
            await log.append([second])
            while len(out.getvalue().splitlines()) < 2:
                await asyncio.sleep(0.02)
    finally:
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)
    assert [json.loads(line)["event"]["exchange_id"] for line in out.getvalue().splitlines()] == ["a", "b"]


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=3), st.randoms(use_true_random=False))
async def test_whatever_comes_first_each_partition_keeps_its_order_and_the_older_goes_first(
    times: list[list[int]], random: Random
) -> None:
    queues = [
        [
            Undecodable(topic="t", partition=p, offset=n, timestamp_ms=ms, key=None, value=None, headers=(), reason="")
            for n, ms in enumerate(sorted(some))
        ]
        for p, some in enumerate(times)
    ]
    ranges = {PartitionId("t", p): (0, len(queue)) for p, queue in enumerate(queues) if queue}

    async def batches() -> AsyncGenerator[Sequence[Arrived], None]:
        left = [list(queue) for queue in queues if queue]
        while left:
            queue = random.choice(left)
            size = random.randint(1, len(queue))
            yield queue[:size]
            del queue[:size]
            left = [some for some in left if some]

    found = [arrived async for arrived in in_time_order(batches(), ranges)]
    assert [arrived.timestamp_ms for arrived in found] == sorted(ms for some in times for ms in some)
    for p, queue in enumerate(queues):
        assert [arrived for arrived in found if arrived.partition == p] == queue


def _now_ms() -> int:
    return round(time.time() * 1000)
