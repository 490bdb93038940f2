"""Whole requests come back from exchanges that hold only what is new, byte for byte."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.conversation.history import WHOLE_EVERY, Parent, WholeRequest, rebuild, shorten, whole, with_first
from clawstream.errors import UnusableExchange
from clawstream.events import ExchangeCompleted, RequestDelta
from tests import strategies
from tests.sessions import history

FEW_MESSAGES = st.lists(st.sampled_from([b"{}", b"[]", b"\xff", b"", b"x"]), max_size=6).map(tuple)
FEW_TOKENS = st.lists(st.integers(0, 2), max_size=10).map(tuple)
REQUESTS = st.builds(
    WholeRequest, messages=FEW_MESSAGES, token_ids=FEW_TOKENS, options=st.sampled_from([b"{}", b'{"a":1}'])
)
ANY_EXCHANGE = strategies.of(ExchangeCompleted)


def asked(request: WholeRequest) -> tuple[object, ...]:
    """The request without how it was rebuilt."""
    return request.messages, request.token_ids, request.options


@given(REQUESTS, REQUESTS, st.integers(0, 2 * WHOLE_EVERY))
def test_what_is_shortened_comes_back_whole(request: WholeRequest, parent: WholeRequest, num_parents: int) -> None:
    older = Parent(exchange_id="p", request=replace(parent, num_parents=num_parents))
    for known in (None, older):
        delta = shorten(request, known)
        assert asked(whole(delta, {"p": older.request})) == asked(request)


@given(REQUESTS, REQUESTS)
def test_what_the_parent_holds_is_not_written_again(request: WholeRequest, parent: WholeRequest) -> None:
    delta = shorten(request, Parent(exchange_id="p", request=parent))
    kept = delta.kept_messages
    assert request.messages[:kept] == parent.messages[:kept]
    assert request.messages[kept : kept + 1] != parent.messages[kept : kept + 1] or not request.messages[kept:]
    assert delta.token_ids == request.token_ids[delta.kept_tokens :]


@given(st.lists(st.tuples(REQUESTS, st.integers(0, 100)), min_size=1, max_size=3 * WHOLE_EVERY), ANY_EXCHANGE)
def test_a_session_comes_back_bit_for_bit_from_any_tree_of_parents(
    asks: list[tuple[WholeRequest, int]], exchange: ExchangeCompleted
) -> None:
    known: list[Parent] = []
    events: list[ExchangeCompleted] = []
    for number, (request, choice) in enumerate(asks):
        parent = known[choice % len(known)] if known and choice else None
        delta = shorten(request, parent)
        rest = whole(delta, {one.exchange_id: one.request for one in known})
        known.append(Parent(exchange_id=str(number), request=rest))
        events.append(replace(exchange, exchange_id=str(number), request=delta))
    rebuilt = history([*events, *events])
    assert {name: asked(one) for name, one in rebuilt.items()} == {
        str(number): asked(request) for number, (request, _) in enumerate(asks)
    }
    deltas = {one.exchange_id: one.request for one in events}
    assert all(asked(rebuild(name, deltas)) == asked(one) for name, one in rebuilt.items())


def test_no_chain_of_parents_is_longer_than_stated() -> None:
    request = WholeRequest(messages=(), token_ids=(), options=b"{}")
    lengths = []
    for number in range(3 * WHOLE_EVERY):
        parent = Parent(exchange_id=str(number), request=request)
        request = whole(shorten(request, parent), {str(number): request})
        lengths.append(request.num_parents)
    assert max(lengths) == WHOLE_EVERY - 1
    assert lengths.count(0) == 3


@given(ANY_EXCHANGE)
def test_a_missing_parent_is_named(exchange: ExchangeCompleted) -> None:
    orphan = replace(exchange, request=replace(exchange.request, parent_exchange_id="gone"))
    with pytest.raises(UnusableExchange, match="gone"):
        history([orphan])
    with pytest.raises(UnusableExchange, match="gone"):
        rebuild(orphan.exchange_id, {orphan.exchange_id: orphan.request})


@pytest.mark.parametrize(("messages", "tokens"), [(2, 0), (0, 3)])
def test_a_parent_that_is_too_short_is_refused(messages: int, tokens: int) -> None:
    delta = RequestDelta(
        parent_exchange_id="p", kept_messages=messages, kept_tokens=tokens, messages=(), token_ids=(), options=None
    )
    with pytest.raises(UnusableExchange, match="p has 1 messages and 2 prompt tokens"):
        whole(delta, {"p": WholeRequest(messages=(b"",), token_ids=(1, 2), options=b"{}")})


def test_a_circle_of_parents_is_refused() -> None:
    circle = RequestDelta(
        parent_exchange_id="a", kept_messages=0, kept_tokens=0, messages=(), token_ids=(), options=None
    )
    with pytest.raises(UnusableExchange):
        rebuild("a", {"a": circle})


def test_of_two_facts_with_one_key_the_first_counts_and_the_second_is_no_news() -> None:
    known = with_first({}, "t0", "first")
    assert with_first(known, "t0", "second") is known
    assert dict(with_first(known, "t1", "another")) == {"t0": "first", "t1": "another"}
