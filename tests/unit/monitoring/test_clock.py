"""The broker's clock: what the newest exchanges say of it, whichever partition they are in."""

import random
from dataclasses import replace

import pytest

from clawstream.monitoring.app import exposition
from clawstream.monitoring.live import Live, as_json
from clawstream.monitoring.policy import PolicyBoard
from clawstream.monitoring.windows import RECENT_MS, BrokerClock, alarm
from clawstream.stream.runner.clock import BELIEVED_MS
from clawstream.stream.stage import DAY_MS, Record
from clawstream.stream.topics import EXCHANGES
from tests.sessions import Session, record, user

NOW_MS = 1_800_000_000_000
JUMP_MS = 3 * DAY_MS


def exchange(offset: int, off_ms: int, over_ms: int = NOW_MS, partition: int = 0) -> Record:
    """An exchange that was over at `over_ms`, and that a clock wrong by `off_ms` dated when it was appended at once."""
    event = replace(Session().ask([user("hi")], "hello"), finished_at_ms=over_ms)
    return record(event, EXCHANGES, offset, over_ms + off_ms)._replace(partition=partition)


def clock_of(*records: Record) -> BrokerClock:
    clock = BrokerClock()
    for one in records:
        clock.learn(one)
    return clock


@pytest.mark.parametrize("off_ms", [JUMP_MS, -JUMP_MS, BELIEVED_MS + 1, -BELIEVED_MS - 1])
def test_a_clock_that_went_wrong_is_an_alarm_until_the_next_exchange_is_dated_right(off_ms: int) -> None:
    before, wrong, right = exchange(0, 0), exchange(1, off_ms), exchange(2, 5)
    assert clock_of(before).off_ms(NOW_MS) == 0
    assert clock_of(before, wrong).off_ms(NOW_MS) == off_ms
    assert clock_of(before, wrong, right).off_ms(NOW_MS) == 0
    assert clock_of(right, wrong, before).off_ms(NOW_MS) == 0, "in any order"


def test_an_alarm_says_which_clock_by_how_much_and_what_to_do() -> None:
    assert "dated 259,200 s ahead of this machine's clock" in (alarm(JUMP_MS) or "")
    assert "dated 259,200 s behind the gateway's clock" in (alarm(-JUMP_MS) or "")
    assert "Set the clocks of broker and machines" in (alarm(JUMP_MS) or "")
    assert (alarm(0), alarm(None)) == (None, None)


def test_without_an_exchange_nothing_is_said_of_the_clock() -> None:
    assert BrokerClock().off_ms(NOW_MS) is None
    assert b"\nclawstream_broker_clock_off_seconds " not in exposition(Live(PolicyBoard("p"), {}).report(NOW_MS))


def test_a_partition_that_is_silent_since_does_not_keep_the_alarm_up_and_one_brokers_wrong_clock_raises_it() -> None:
    wrong = exchange(7, JUMP_MS, NOW_MS - RECENT_MS - 1, partition=1)
    meanwhile = exchange(3, 0, NOW_MS - RECENT_MS, partition=0)
    since = exchange(4, 0, NOW_MS, partition=0)
    assert clock_of(wrong, meanwhile).off_ms(NOW_MS) == JUMP_MS - RECENT_MS - 1
    assert clock_of(wrong, meanwhile, since).off_ms(NOW_MS) == 0


def test_what_waited_in_a_spool_and_a_gateway_whose_clock_is_ahead_say_nothing_of_the_brokers() -> None:
    event = replace(Session().ask([user("hi")], "hello"), finished_at_ms=NOW_MS - DAY_MS)
    assert clock_of(record(event, EXCHANGES, 0, NOW_MS)).off_ms(NOW_MS) == 0
    ahead = replace(event, finished_at_ms=NOW_MS + JUMP_MS)
    assert clock_of(record(ahead, EXCHANGES, 0, NOW_MS)).off_ms(NOW_MS) == 0


def test_the_report_and_the_metrics_have_the_alarm_while_the_clock_is_wrong_and_no_longer() -> None:
    told = Live(PolicyBoard("policy"), {})
    said = []
    for offset, off_ms in enumerate((0, JUMP_MS, 0)):
        told.receive(exchange(offset, off_ms), NOW_MS)
        report = told.report(NOW_MS)
        line = next(one for one in exposition(report).decode().splitlines() if one.startswith("clawstream_broker_"))
        said.append((as_json(report)["clock_alarm"] is not None, line))
    name = "clawstream_broker_clock_off_seconds"
    assert said == [(False, f"{name} 0.0"), (True, f"{name} 259200.0"), (False, f"{name} 0.0")]


def test_a_record_that_is_read_again_changes_nothing() -> None:
    records = [exchange(offset, JUMP_MS if offset == 5 else 0) for offset in range(9)]
    shuffled = random.Random(1).sample([*records, *records], 18)
    assert clock_of(*shuffled).off_ms(NOW_MS) == 0
