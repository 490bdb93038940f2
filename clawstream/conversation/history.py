"""Whole requests from recorded ones, and how much of a request a later one repeats. Pure.

The gateway writes what `shorten` returns, and every reader gets the same request back, byte for byte, by `whole`. Two
requests are compared by the conversation's messages, and a user's message by each line that the person wrote: clients
join messages of one role, drop some, and replace the first ones by a summary. A killed stage may write events of a
session's past life again: they don't count in its next life.
"""

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from clawstream.conversation.messages import Message, lines_of, main_messages, parse, role_of, said_in
from clawstream.errors import UnusableExchange
from clawstream.events.base import Event, TokenIds
from clawstream.events.exchanges import RequestDelta, TurnPaired, TurnsSettled
from clawstream.events.judging import HintAbsent, HintFound, TeacherScored, VerdictReached, VoteCast

WHOLE_EVERY = 32  # a request and its chain of parents are at most so many requests
REMEMBERED_OVER = 1024  # ids of past lives; a restarted stage writes at most so many events again
_K = TypeVar("_K")
_V = TypeVar("_V")


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
    if parent is not None and parent.request.num_parents + 1 >= WHOLE_EVERY:
        parent = None
    kept_messages = 0 if parent is None else num_equal(parent.request.messages, request.messages)
    kept_tokens = 0 if parent is None else num_equal(parent.request.token_ids, request.token_ids)
    return RequestDelta(
        parent_exchange_id=None if parent is None else parent.exchange_id,
        kept_messages=kept_messages,
        kept_tokens=kept_tokens,
        messages=request.messages[kept_messages:],
        token_ids=request.token_ids[kept_tokens:],
        options=request.options if parent is None or request.options != parent.request.options else None,
    )


def whole(delta: RequestDelta, known: Mapping[str, WholeRequest]) -> WholeRequest:
    """Return the request that `delta` shortens; `known` holds whole requests by exchange id.

    Raises UnusableExchange when the parent is not in `known`, or is too short to be the one that was meant.
    """
    if delta.parent_exchange_id is None:
        if delta.options is None or delta.kept_messages or delta.kept_tokens:
            raise UnusableExchange("a request without a parent has no options, or keeps messages or tokens of a parent")
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


def rebuild(exchange_id: str, deltas: Mapping[str, RequestDelta]) -> WholeRequest:
    """Return one exchange's whole request from its chain of parents; `deltas` holds shortened requests by exchange id.

    Raises UnusableExchange where the exchange or a parent is missing, or a parent is too short.
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
    """Return the request of the first of `deltas`; each delta's parent is the next. Only kept parts are copied."""
    options = whole(deltas[-1], {}).options
    num_messages = num_tokens = 0
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
        messages=tuple(chain.from_iterable(reversed(messages))),
        token_ids=tuple(chain.from_iterable(reversed(tokens))),
        options=options,
        num_parents=len(deltas) - 1,
    )


def num_equal(left: Sequence[object], right: Sequence[object]) -> int:
    """Return how many leading items are equal; slices are compared, since a prompt has many thousand tokens."""
    left, right = tuple(left), tuple(right)
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


@dataclass(frozen=True, slots=True)
class Said:
    """A unit of the conversation: a message, or one line of a person's message; `index` is the message's."""

    index: int
    message: Message
    meaning: Hashable


@dataclass(frozen=True, slots=True)
class Continued:
    """How a history goes on after an earlier request's messages."""

    last: int  # index in the history of the last message that the request had; -1: there is none
    found: Said | None  # the first new unit; None: nothing is new
    num_lines: int  # lines of `found`'s message that the request had already; not 0 where the client joined two
    exact: bool  # exactly the request's messages precede `found`


def said(messages: Sequence[bytes], start: int = 0) -> list[Said]:
    """Return the units of the conversation from message `start` on."""
    return list(each_said(messages, start))


def each_said(messages: Sequence[bytes], start: int) -> Iterator[Said]:
    """Yield the units of the conversation from message `start` on."""
    for index, message in main_messages(messages, start):
        for meaning in said_in(message):
            yield Said(index, message, meaning)


def num_same(left: Sequence[Said], right: Sequence[Said]) -> int:
    """Return how many leading units have the same meaning."""
    return num_equal([one.meaning for one in left], [one.meaning for one in right])


def starts_with(now: Sequence[Said], before: Sequence[Said]) -> bool:
    """Return whether `now` begins with all of `before`."""
    return len(before) <= len(now) and num_same(now, before) == len(before)


def left_of(before: Sequence[Said], now: Sequence[Said]) -> tuple[int, int]:
    """Return how many leading units of `now` occur in `before` in this order, and how far into `before` they reach.

    Each unit is matched as early in `before` as possible.
    """
    reached = 0
    for number, one in enumerate(now):
        at = next((at for at in range(reached, len(before)) if before[at].meaning == one.meaning), None)
        if at is None:
            return number, reached
        reached = at + 1
    return len(now), reached


def continued(asked: Sequence[bytes], history: Sequence[bytes]) -> Continued | None:
    """Return how `history` goes on after the messages `asked`; None if it lacks the last user's message in `asked`.

    Other messages may have been dropped, or replaced by a summary. If `asked` has no user's message, none may.
    """
    same = num_equal(asked, history)
    before, now = said(asked, same), said(history, same)
    num_left, exact = len(before), starts_with(now, before)
    if not exact:
        before, now = said(asked), said(history)
        num_left, reached = left_of(before, now)
        persons = [at for at, one in enumerate(before) if role_of(one.message) == "user"]
        if not persons or reached <= persons[-1]:
            return None
    last = now[num_left - 1].index if num_left else same - 1
    found = now[num_left] if num_left < len(now) else None
    joined = found is not None and found.index == last
    return Continued(last, found, sum(one.index == last for one in now[:num_left]) if joined else 0, exact)


def reaction(asked: Sequence[bytes], history: Sequence[bytes], next_state: Sequence[int]) -> tuple[Message, ...]:
    """Return the messages of `history` that followed a cut-off answer to `asked`.

    Where the client joined the first of them to the question, the question's lines are left out.
    """
    first, *more = (parse(history[index]) for index in next_state)
    going_on = continued(asked, history)
    if going_on is not None and going_on.found is not None and going_on.found.index == next_state[0]:
        first = _without(first, going_on.num_lines)
    return first, *more


def _without(message: Message, num_lines: int) -> Message:
    content = message["content"]
    kept: list[object] = []
    for part in [content] if isinstance(content, str) else content:
        text = part if isinstance(part, str) else part.get("text", "")
        lines = lines_of({"content": text}) if num_lines else ()
        if not num_lines:
            kept.append(part)
        elif len(lines) > num_lines:
            rest = "\n".join(lines[num_lines:])
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
        num_lines = max(0, num_lines - len(lines))
    return {**message, "content": kept[0] if isinstance(content, str) else kept}


# Ids of the turns of past lives, and of the exchanges after which these turns were settled; the oldest first.
Over = Mapping[str, None]


_State = TypeVar("_State", bound=tuple[object, ...])


def with_first(known: Mapping[_K, _V], key: _K, value: _V) -> Mapping[_K, _V]:
    """Return the mapping with the entry; the same object where it has the key: of two facts the first counts."""
    return known if key in known else with_entry(known, key, value)


def with_entry(known: Mapping[_K, _V], key: _K, value: _V) -> Mapping[_K, _V]:
    """Return the mapping with the entry, which replaces one of the same key."""
    return MappingProxyType({**known, key: value})


def only(known: Mapping[_K, _V], wanted: Callable[[_K], bool]) -> Mapping[_K, _V]:
    """Return the entries with a wanted key."""
    return MappingProxyType({key: value for key, value in known.items() if wanted(key)})


def changed(before: _State, after: _State) -> _State:
    """Return `after`, or `before` if all fields are the same objects: then nothing was learned."""
    return before if all(map(operator.is_, before, after)) else after


class SettledTurns(NamedTuple):
    """A TurnsSettled, which came after the session's first `num_turns` turns.

    The first `start` of these are of earlier lives of the session, which the client had said were done.
    """

    settled: TurnsSettled
    start: int
    num_turns: int


def buried(over: Over, marks: Iterable[SettledTurns], turn_ids: Iterable[str]) -> Over:
    """Return `over` with the ids of a life that just ended; the newest `REMEMBERED_OVER` of them."""
    ids = [*over, *turn_ids, *(mark.settled.after_exchange_id for mark in marks)]
    return MappingProxyType(dict.fromkeys(list(dict.fromkeys(ids))[-REMEMBERED_OVER:]))


def is_over(over: Over, event: Event) -> bool:
    """Return whether the event belongs to a past life of the session, and so was read before."""
    match event:
        case TurnsSettled():
            return event.after_exchange_id in over
        case TurnPaired() | VoteCast() | VerdictReached() | HintFound() | HintAbsent() | TeacherScored():
            return event.turn_id in over
    return False


def marked(marks: tuple[SettledTurns, ...], settled: TurnsSettled, num_turns: int) -> tuple[SettledTurns, ...]:
    """Return the marks with `settled` added; the same tuple where it is known."""
    if any(mark.settled == settled for mark in marks):
        return marks
    start = max((mark.num_turns for mark in marks if mark.settled.done), default=0)
    return (*marks, SettledTurns(settled, start, num_turns))
