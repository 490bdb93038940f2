"""Any event, for properties: `of(kind)` draws one, and any field can be fixed or drawn otherwise.

`of(SessionIdle, session_id=st.just("s"))`. What a producer always keeps true holds here too: an answer has as many
log-probs as tokens, its version spans add up, a request without a parent keeps nothing and has options.
"""

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from clawstream.events import (
    EVENTS,
    AnswerRefreshed,
    Event,
    ExchangeCompleted,
    Packed,
    RequestDelta,
    SampleAssembled,
    VersionSpan,
)
from clawstream.events.base import float32

T = TypeVar("T")
Draw = Callable[[st.SearchStrategy[Any]], Any]

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=12) | st.sampled_from(["", "\0", "\ud800x"])
SESSION_IDS = st.sampled_from(["ann", "ben", "cas", "dea"])
TOKEN_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=8).map(tuple)
LOGPROBS = st.none() | st.floats(-100, 0, width=32)
MESSAGES = st.builds(
    lambda role, content: json.dumps({"role": role, "content": content}).encode(),
    st.sampled_from(["user", "assistant", "system", "tool"]),
    TEXTS,
)
_PACKED: dict[object, st.SearchStrategy[tuple[Any, ...]]] = {
    Packed.INT32: st.lists(INT32, max_size=8).map(tuple),
    Packed.INT8: st.lists(st.integers(0, 1), max_size=8).map(tuple),
    Packed.FLOAT32: st.lists(LOGPROBS, max_size=8).map(float32),
}
_PLAIN: dict[object, st.SearchStrategy[Any]] = {
    str: TEXTS,
    bytes: MESSAGES | st.binary(max_size=12),
    int: INT64,
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
}


def of(kind: type[T], **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[T]:
    """Return any `kind`, a dataclass of clawstream/events; `fixed` says how to draw the fields that it names."""
    return st.composite(lambda draw: _draw(draw, kind, fixed))()


def events() -> st.SearchStrategy[Event]:
    """Return any event of any type."""
    return st.sampled_from(EVENTS).flatmap(of)


def _draw(draw: Draw, kind: type[T], fixed: dict[str, st.SearchStrategy[Any]]) -> T:
    assert is_dataclass(kind)
    hints = get_type_hints(kind, include_extras=True)
    drawn = {field.name: draw(fixed.get(field.name, _of_type(hints[field.name], field.name))) for field in fields(kind)}
    agreed = _AGREE[kind](draw, drawn) if kind in _AGREE else drawn
    return kind(**agreed | {name: drawn[name] for name in fixed})


def _of_type(hint: Any, name: str) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _PACKED[arguments[1]]
    if origin in (UnionType, Union):
        [inner] = [argument for argument in arguments if argument is not NoneType]
        return st.none() | _of_type(inner, name)
    if origin is tuple:
        return st.lists(_of_type(arguments[0], name), max_size=3).map(tuple)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return of(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    return SESSION_IDS if name == "session_id" else _PLAIN[hint]


def _request(_draw: Draw, drawn: dict[str, Any]) -> dict[str, Any]:
    if drawn["parent_exchange_id"] is None:
        return drawn | {"kept_messages": 0, "kept_tokens": 0, "options": drawn["options"] or b"{}"}
    return drawn | {"kept_messages": max(0, drawn["kept_messages"]), "kept_tokens": max(0, drawn["kept_tokens"])}


def _answer(draw: Draw, drawn: dict[str, Any]) -> dict[str, Any]:
    num_tokens = len(drawn["output_ids"])
    return drawn | {"output_logprobs": _logprobs(draw, num_tokens), "versions": _spans(draw, num_tokens)}


def _sample(draw: Draw, drawn: dict[str, Any]) -> dict[str, Any]:
    num_tokens = len(drawn["response_ids"])
    trained = tuple(draw(st.lists(st.integers(0, 1), min_size=num_tokens, max_size=num_tokens)))
    hinted = None if drawn["hint"] is None else draw(TOKEN_IDS)
    return drawn | {
        "response_logprobs": _logprobs(draw, num_tokens),
        "versions": _spans(draw, num_tokens),
        "trained": trained,
        "hinted_prompt_ids": hinted,
    }


def _logprobs(draw: Draw, num_tokens: int) -> tuple[float | None, ...]:
    return float32(draw(st.lists(LOGPROBS, min_size=num_tokens, max_size=num_tokens)))


def _spans(draw: Draw, num_tokens: int) -> tuple[VersionSpan, ...]:
    if num_tokens == 0:
        return ()
    cut = draw(st.integers(1, num_tokens))
    parts = [num for num in (cut, num_tokens - cut) if num]
    return tuple(VersionSpan(policy_version=version, num_tokens=num) for version, num in enumerate(parts))


_AGREE: dict[type, Callable[[Draw, dict[str, Any]], dict[str, Any]]] = {
    RequestDelta: _request,
    ExchangeCompleted: _answer,
    AnswerRefreshed: _answer,
    SampleAssembled: _sample,
}
