"""When the log counts as slow, and when as quick again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.gateway.outbox.spooled_sessions import AckPace

BOUND_S = 0.02
NEW = AckPace(bound_s=BOUND_S)


def after(pace: AckPace, latencies_s: list[float]) -> AckPace:
    for latency_s in latencies_s:
        pace = pace.after(latency_s)
    return pace


def test_one_late_acknowledgement_in_ten_is_no_slow_broker() -> None:
    pace = NEW
    for _ in range(20):
        pace = after(pace, [0.006] * 9 + [5.0])
        assert not pace.slow


@given(st.lists(st.floats(0, 10), max_size=50), st.floats(2 * BOUND_S, 10))
def test_acknowledgements_that_all_take_twice_the_bound_are_found_out_within_eight(
    before: list[float], latency_s: float
) -> None:
    assert after(after(NEW, before), [latency_s] * 8).slow


@given(st.lists(st.floats(0, 10), max_size=50))
def test_a_broker_is_found_to_be_quick_again_within_twenty(before: list[float]) -> None:
    assert not after(after(NEW, before), [0.006] * 20).slow


def test_what_our_own_event_loop_adds_is_not_the_brokers() -> None:
    busy = NEW.with_own_delay(0.1)
    assert not after(busy, [0.106] * 100).slow
    assert busy.patience_s == 0.1 + BOUND_S


def test_while_one_is_overdue_nothing_else_waits_behind_it() -> None:
    assert NEW.quick(BOUND_S)
    assert not NEW.quick(BOUND_S * 1.01)


def test_a_slow_log_is_not_waited_for_though_nothing_is_overdue() -> None:
    assert not after(NEW, [2.5 * BOUND_S] * 8).quick(0.0)


def test_a_process_that_was_stopped_does_not_wait_for_as_long_afterwards() -> None:
    assert NEW.with_own_delay(60.0).patience_s == pytest.approx(11 * BOUND_S)
