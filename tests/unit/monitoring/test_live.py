"""The report: what is absent is null, for programs and for Prometheus alike."""

from dataclasses import replace

import orjson

from clawstream.monitoring.alarm import STILL_MS, STILL_SAMPLES
from clawstream.monitoring.app import exposition
from clawstream.monitoring.live import Live, as_json
from clawstream.monitoring.policy import PolicyBoard
from clawstream.monitoring.windows import MINUTE_MS
from clawstream.stream.stage import DAY_MS, Record
from clawstream.stream.topics import EXCHANGES, POLICY, SAMPLES, VERDICTS
from tests.sessions import Session, record, user
from tests.unit.monitoring.said import activated, sample, verdict

NOON_MS = 1_800_000_000_000 // MINUTE_MS * MINUTE_MS


def live(*records: Record, unread: dict[tuple[str, int], int] | None = None) -> Live:
    told = Live(PolicyBoard("policy"), unread or {})
    for one in records:
        told.receive(one, NOON_MS)
    return told


def test_before_anything_was_said_every_average_is_null() -> None:
    told = orjson.loads(orjson.dumps(as_json(live().report(NOON_MS + 30_000))))
    assert (told["rebuilt"], told["published_version"], told["oldest_waiting_s"]) == (True, None, None)
    assert [told["hour"][name] for name in ("mean_score", "unreadable_share", "pause_ms_max")] == [None] * 3
    assert (told["samples_waiting"], len(told["minutes"]), told["minutes"][-1]["seconds"]) == (0, 60, 30.0)


def test_tokens_a_second_are_of_the_time_that_has_passed() -> None:
    answer = Session().ask([user("hi")], "x" * 120)
    report = live(record(answer, EXCHANGES, at_ms=NOON_MS)).report(NOON_MS + 30_000)
    assert report.minutes[-1].tokens_per_s == 4.0
    assert live().report(NOON_MS).minutes[-1].tokens_per_s is None


def test_the_oldest_waiting_sample_ages_with_the_clock() -> None:
    report = live(record(sample("t"), SAMPLES, at_ms=NOON_MS)).report(NOON_MS + 90_000)
    assert (report.samples_waiting, report.oldest_waiting_s) == (1, 90.0)


def test_samples_that_nobody_plans_raise_the_alarm_once_they_have_waited() -> None:
    told = live(*(record(sample(f"t-{n}"), SAMPLES, n, at_ms=NOON_MS) for n in range(STILL_SAMPLES)))
    assert told.report(NOON_MS + STILL_MS - 1).alarm is None
    assert "does `clawstream train` run?" in (told.report(NOON_MS + STILL_MS).alarm or "")


def test_the_hour_is_rebuilt_once_every_partition_was_read_to_where_it_ended() -> None:
    told = live(unread={(SAMPLES, 0): 2, (VERDICTS, 0): 1})
    steps = [record(sample("a"), SAMPLES, 0), record(verdict("a", 1), VERDICTS, 0), record(sample("b"), SAMPLES, 1)]
    rebuilt = []
    for one in steps:
        told.receive(one, NOON_MS)
        rebuilt.append(told.report(NOON_MS).rebuilt)
    assert rebuilt == [False, False, True]


def test_a_sample_that_was_written_twice_waits_once() -> None:
    told = live(record(sample("a"), SAMPLES, 0, NOON_MS), record(sample("a"), SAMPLES, 1, NOON_MS))
    assert told.report(NOON_MS).samples_waiting == 1


def test_while_the_brokers_clock_is_wrong_the_windows_go_on_by_this_machines() -> None:
    told, days_ms = live(), 3 * DAY_MS
    for number, off_ms in enumerate((0, days_ms, days_ms, 0, -days_ms)):
        exchange = replace(Session(str(number)).ask([user("hi")], "hello"), finished_at_ms=NOON_MS)
        told.receive(record(exchange, EXCHANGES, number, NOON_MS + off_ms), NOON_MS + number)
    assert told.report(NOON_MS + 5).minutes[-1].tally.exchanges == {"completed": 5}


def test_prometheus_gets_the_last_whole_minute_and_the_hour_and_no_line_for_what_is_absent() -> None:
    text = exposition(
        live(
            record(verdict("a", -1), VERDICTS, 0, NOON_MS - 1),
            record(activated(3, pause_ms=4.5), POLICY, 0, NOON_MS - 30 * MINUTE_MS),
        ).report(NOON_MS + 1000)
    ).decode()
    assert 'clawstream_window_mean_score{window="1m"} -1.0' in text
    assert 'clawstream_window_pause_ms_max{window="60m"} 4.5' in text
    assert 'clawstream_window_pause_ms_max{window="1m"}' not in text
    assert 'clawstream_policy_active_version{engine="http://engine"} 3.0' in text
    assert "\nclawstream_policy_published_version " not in text
    assert "\nclawstream_samples_oldest_waiting_seconds " not in text


def test_no_metric_is_labelled_with_what_a_person_said_or_who_it_was() -> None:
    text = exposition(live(record(Session("ann").ask([user("secret")], "word"), EXCHANGES, 0, NOON_MS)).report(NOON_MS))
    assert b"ann" not in text
    assert b"secret" not in text
