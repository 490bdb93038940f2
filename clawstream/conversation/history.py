"""Whole requests from exchanges that hold only what is new. Pure.

The gateway writes what `shorten` returns, and every reader gets the request back by `whole`: for any request and parent
`whole(parent, shorten(request, parent)) == request`, byte for byte.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from clawstream.errors import UnusableExchange
from clawstream.events.base import TokenIds
from clawstream.events.exchanges import ExchangeCompleted, RequestDelta

_T = TypeVar("_T")
WHOLE_EVERY = 32  # the longest chain of parents


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRequest:
    """A request as it was asked, and how many parents it was rebuilt from."""

    messages: tuple[bytes, ...]  # each as JSON
    token_ids: TokenIds  # the prompt
    options: bytes  # the body without messages, as JSON
    num_parents: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """A request that a later one may refer to."""

    exchange_id: str
    request: WholeRequest


def shorten(request: WholeRequest, parent: Parent | None) -> RequestDelta:
    """Return `request` without what `parent` holds; whole where there is no parent or the chain would be too long."""
    if parent is None or parent.request.num_parents + 1 >= WHOLE_EVERY:
        return RequestDelta(
            parent_exchange_id=None,
            kept_messages=0,
            kept_tokens=0,
            messages=request.messages,
            token_ids=request.token_ids,
            options=request.options,
        )
    kept_messages = _common(parent.request.messages, request.messages)
    kept_tokens = _common(parent.request.token_ids, request.token_ids)
    return RequestDelta(
        parent_exchange_id=parent.exchange_id,
        kept_messages=kept_messages,
        kept_tokens=kept_tokens,
        messages=request.messages[kept_messages:],
        token_ids=request.token_ids[kept_tokens:],
        options=None if request.options == parent.request.options else request.options,
    )


def whole(delta: RequestDelta, known: Mapping[str, WholeRequest]) -> WholeRequest:
    """Return the request that `delta` shortens; `known` holds whole requests by exchange id.

    Raises UnusableExchange when the parent is not in `known`, or is too short to be the one that was meant.
    """
    if delta.parent_exchange_id is None:
        if delta.options is None or delta.kept_messages or delta.kept_tokens:
            raise UnusableExchange("a request without a parent keeps nothing and has options; this one does not")
        return WholeRequest(messages=delta.messages, token_ids=delta.token_ids, options=delta.options)
    parent = known.get(delta.parent_exchange_id)
    if parent is None:
        raise UnusableExchange(
            f"parent exchange {delta.parent_exchange_id} is not known: read the session from its last whole exchange"
        )
    if len(parent.messages) < delta.kept_messages or len(parent.token_ids) < delta.kept_tokens:
        raise UnusableExchange(
            f"parent exchange {delta.parent_exchange_id} has {len(parent.messages)} messages and "
            f"{len(parent.token_ids)} prompt tokens; {delta.kept_messages} and {delta.kept_tokens} are to be kept"
        )
    return WholeRequest(
        messages=parent.messages[: delta.kept_messages] + delta.messages,
        token_ids=parent.token_ids[: delta.kept_tokens] + delta.token_ids,
        options=parent.options if delta.options is None else delta.options,
        num_parents=parent.num_parents + 1,
    )


def history(exchanges: Iterable[ExchangeCompleted]) -> dict[str, WholeRequest]:
    """Return every exchange's whole request by exchange id; parents come before their children, repeats are harmless.

    Raises UnusableExchange where a parent is missing.
    """
    known: dict[str, WholeRequest] = {}
    for exchange in exchanges:
        if exchange.exchange_id not in known:
            known[exchange.exchange_id] = whole(exchange.request, known)
    return known


def rebuild(exchange_id: str, deltas: Mapping[str, RequestDelta]) -> WholeRequest:
    """Return one exchange's whole request from its chain of parents; `deltas` holds shortened requests by exchange id.

    Raises UnusableExchange where a parent is missing.
    """
    links: list[str] = []
    wanted: str | None = exchange_id
    while wanted is not None and wanted in deltas and len(links) <= len(deltas):
        links.append(wanted)
        wanted = deltas[wanted].parent_exchange_id
    if wanted is not None:
        raise UnusableExchange(
            f"exchange {wanted}, on which the request of {exchange_id} rests, is not known: it can't be rebuilt"
        )
    return _joined([deltas[link] for link in links], exchange_id)


def _joined(deltas: Sequence[RequestDelta], exchange_id: str) -> WholeRequest:
    """Return the request of the first of `deltas`; each delta's parent is the next. Cut parts are not copied."""
    root = deltas[-1]
    if root.parent_exchange_id is not None or root.options is None or root.kept_messages or root.kept_tokens:
        raise UnusableExchange("a request without a parent keeps nothing and has options; this one does not")
    num_messages = num_tokens = 0
    options = root.options
    for delta in reversed(deltas):
        if num_messages < delta.kept_messages or num_tokens < delta.kept_tokens:
            raise UnusableExchange(
                f"exchange {exchange_id} rests on {delta.parent_exchange_id}, which has {num_messages} messages and "
                f"{num_tokens} prompt tokens; {delta.kept_messages} and {delta.kept_tokens} are to be kept"
            )
        num_messages = delta.kept_messages + len(delta.messages)
        num_tokens = delta.kept_tokens + len(delta.token_ids)
        options = options if delta.options is None else delta.options
    messages: list[tuple[bytes, ...]] = []
    tokens: list[TokenIds] = []
    for delta in deltas:
        if num_messages > delta.kept_messages:
            messages.append(delta.messages[: num_messages - delta.kept_messages])
            num_messages = delta.kept_messages
        if num_tokens > delta.kept_tokens:
            tokens.append(delta.token_ids[: num_tokens - delta.kept_tokens])
            num_tokens = delta.kept_tokens
    return WholeRequest(
        messages=_in_order(messages),
        token_ids=_in_order(tokens),
        options=options,
        num_parents=len(deltas) - 1,
    )


def _in_order(newest_first: Sequence[tuple[_T, ...]]) -> tuple[_T, ...]:
    """Return the parts joined, the last one first."""
    found: list[_T] = []
    for part in reversed(newest_first):
        found += part
    return tuple(found)


def _common(left: tuple[object, ...], right: tuple[object, ...]) -> int:
    """Return how many leading items are equal."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    low, high = 0, shorter  # left[:low] == right[:low], left[:high] != right[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
