"""Sessions stay where they are unless that is away or clearly more loaded; nobody is passed to and fro."""

from hypothesis import given
from hypothesis import strategies as st

from clawstream.gateway.engines import (
    BEHIND_FOR_S,
    SLACK_REQUESTS,
    EngineState,
    choose,
    offered,
    order_of,
)

LOADS = st.lists(st.none() | st.integers(0, 50), min_size=1, max_size=6)
STANDINGS = st.lists(
    st.builds(
        EngineState,
        version=st.none() | st.integers(0, 3),
        newest_had=st.integers(0, 3),
        behind_s=st.none() | st.floats(0, 100),
    ),
    min_size=1,
    max_size=5,
)
URLS = [f"http://engine-{n}" for n in range(5)]


@given(LOADS, st.none() | st.integers(0, 5))
def test_whoever_is_chosen_is_offered_and_somebody_is_unless_nobody_is(
    loads: list[int | None], home: int | None
) -> None:
    order = list(range(len(loads)))
    found = choose(loads, home=home, order=order)
    assert (found is None) == all(load is None for load in loads)
    assert found is None or loads[found] is not None


@given(LOADS, st.integers(0, 5))
def test_a_session_leaves_a_home_that_is_there_only_for_one_with_much_less_in_flight(
    loads: list[int | None], home: int
) -> None:
    found = choose(loads, home=home, order=list(range(len(loads))))
    if home < len(loads) and found is not None and found != home and (at_home := loads[home]) is not None:
        there = loads[found]
        assert there is not None
        assert there == min(load for load in loads if load is not None)
        assert at_home - there > max(SLACK_REQUESTS, there)


@given(LOADS, st.integers(0, 5))
def test_a_session_that_moved_does_not_move_back_for_what_it_brought(loads: list[int | None], home: int) -> None:
    order = list(range(len(loads)))
    found = choose(loads, home=home, order=order)
    if found is None or found == home:
        return
    moved = [load if load is None else load + (number == found) for number, load in enumerate(loads)]
    assert choose(moved, home=found, order=order) == found


def test_equal_engines_share_new_sessions_about_evenly_and_a_lost_one_moves_only_its_own() -> None:
    sessions = [f"session {n}" for n in range(3000)]
    everywhere = {s: choose([0] * 5, home=None, order=order_of(s, URLS)) for s in sessions}
    without_2 = {s: choose([0, 0, None, 0, 0], home=None, order=order_of(s, URLS)) for s in sessions}
    counts = [list(everywhere.values()).count(number) for number in range(5)]
    assert min(counts) > 500
    assert all(everywhere[s] in (2, without_2[s]) for s in sessions)


@given(STANDINGS)
def test_only_engines_that_answer_are_offered_and_one_is_wherever_one_answers(engines: list[EngineState]) -> None:
    found = offered(engines)
    assert any(found) == any(engine.version is not None for engine in engines)
    assert all(engine.version is not None for engine, ok in zip(engines, found, strict=True) if ok)


@given(STANDINGS)
def test_an_engine_with_older_weights_than_it_had_is_offered_only_where_no_other_is_current(
    engines: list[EngineState],
) -> None:
    current = [e for e in engines if e.version is not None and e.version >= e.newest_had]
    newest = max((e.version for e in engines if e.version is not None), default=None)
    if any(e.version == newest for e in current):
        for engine, ok in zip(engines, offered(engines), strict=True):
            assert not ok or (engine.version or 0) >= engine.newest_had


def test_an_engine_that_waits_for_its_turn_is_offered_for_a_while_and_one_that_comes_up_behind_is_not() -> None:
    ahead = EngineState(version=2, newest_had=2, behind_s=0.0)
    waits = EngineState(version=1, newest_had=1, behind_s=BEHIND_FOR_S)
    stays = EngineState(version=1, newest_had=1, behind_s=BEHIND_FOR_S + 1)
    comes = EngineState(version=1, newest_had=1, behind_s=None)
    assert offered([ahead, waits, stays, comes]) == (True, True, False, False)
