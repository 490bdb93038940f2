"""The log's clock."""

from clawstream.stream.runner.clock import LogClock


def test_nothing_read_is_no_time() -> None:
    assert LogClock(["a"]).now_ms([], 5.0) is None


def test_it_runs_on_once_everything_is_read() -> None:
    clock = LogClock(["a"])
    clock.see("a", 1000, at_s=10.0)
    assert clock.now_ms([], 10.5) == 1500


def test_it_stands_where_the_slowest_topic_stands() -> None:
    clock = LogClock(["a", "b"])
    clock.see("a", 9000, at_s=1.0)
    clock.see("b", 2000, at_s=1.0)
    assert clock.now_ms(["b"], 50.0) == 2000
    clock.see("b", 3000, at_s=60.0)
    assert clock.now_ms(["b"], 99.0) == 3000
    assert clock.now_ms([], 99.0) == 9000 + 98_000


def test_a_topic_that_has_records_and_none_was_read_says_nothing() -> None:
    clock = LogClock(["a", "b"])
    clock.see("a", 9000, at_s=1.0)
    assert clock.now_ms(["b"], 2.0) is None


def test_it_never_goes_back() -> None:
    clock = LogClock(["a", "b"])
    clock.see("a", 5000, at_s=0.0)
    assert clock.now_ms([], 1.0) == 6000
    clock.see("b", 1000, at_s=1.0)
    assert clock.now_ms(["b"], 1.0) == 6000


def test_after_a_restart_it_goes_on_from_what_was_noted() -> None:
    clock = LogClock(["a"])
    clock.see("a", 1000, at_s=0.0)
    clock.resume(4000, at_s=0.0)
    assert clock.now_ms(["a"], 0.0) == 4000
    assert clock.now_ms([], 1.0) == 5000
