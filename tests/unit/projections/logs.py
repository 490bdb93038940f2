"""Logs for tests: any event from the types of its fields, and records as a broker would have placed them."""

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from hashlib import md5
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints
from zlib import crc32

from hypothesis import strategies as st

from clawstream.events import EVENTS, Event, Packed, float32
from clawstream.projections.write.rows import TABLE_OF
from clawstream.stream.log import PartitionId
from clawstream.stream.stage import Record

NUM_PARTITIONS = 3
START_MS = 1_700_000_000_000

TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=12) | st.sampled_from(
    ["", "\0", "\ud800", "\udfff\ud800", "\u241b", "\u241bu0000", '"\\', "a" * 3000, "\U0001f600"]
)
JSON_TEXTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
).flatmap(lambda value: st.booleans().map(lambda ascii_only: _encoded(value, ascii_only)))
_FEW_IDS = st.sampled_from(["a", "b", "c", "\ud800", "x" * 4000])
_PACKED = {
    Packed.INT32: st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(tuple),
    Packed.INT8: st.lists(st.integers(0, 1), max_size=5).map(tuple),
    Packed.FLOAT32: st.lists(st.none() | st.floats(-100, 0, width=32), max_size=5).map(float32),
}


def _encoded(value: object, ascii_only: bool) -> bytes:
    if not ascii_only:
        try:
            return json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            pass
    return json.dumps(value).encode()


def of_type(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Any value of a type that events use; ids are few, so that they meet."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _PACKED[arguments[1]]
    if origin in (UnionType, Union):
        [inner] = [argument for argument in arguments if argument is not NoneType]
        return st.none() | of_type(inner, name)
    if origin is tuple:
        return st.lists(of_type(arguments[0], name), max_size=3).map(tuple)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return built(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if hint is str:
        return _FEW_IDS if name.endswith(("_id", "_ids")) else TEXTS
    return {
        bytes: JSON_TEXTS | st.just(b"not JSON \xff"),
        int: st.integers(-(2**63), 2**63 - 1) if name == "seed" else st.integers(0, 2**31 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
    }[hint]


def built(kind: type) -> st.SearchStrategy[Any]:
    """Any value of a dataclass of clawstream/events."""
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{field.name: of_type(hints[field.name], field.name) for field in fields(kind)})


@cache
def events() -> st.SearchStrategy[Event]:
    """Any event of any type."""
    return st.one_of([built(kind) for kind in EVENTS])


def records(facts: Sequence[Event]) -> dict[PartitionId, list[Record]]:
    """Place facts as the broker would: by topic and key, offsets counting up, with a hole after every third."""
    placed: dict[PartitionId, list[Record]] = {}
    for n, fact in enumerate(facts):
        topic = TABLE_OF[type(fact)][0].info["topic"]
        place = PartitionId(topic, crc32(repr(fact.key).encode()) % NUM_PARTITIONS)
        before = placed.setdefault(place, [])
        placed[place].append(
            Record(
                topic=place.topic,
                partition=place.partition,
                offset=len(before) + len(before) // 3,
                timestamp_ms=START_MS + n,
                key=fact.key,
                event=fact,
                digest=md5(repr(fact).encode("utf-8", "surrogatepass")).digest(),
            )
        )
    return placed


_EXAMPLES = {str: "text", int: 1, float: 0.5, bool: True, bytes: b"{}"}


def example(kind: type[Any], **changes: object) -> Any:
    """A plain value of a dataclass of clawstream/events: absent where it may be, else short, with these changes."""
    hints = get_type_hints(kind, include_extras=True)
    return kind(**{field.name: _plain(hints[field.name]) for field in fields(kind)} | changes)


def _plain(hint: Any) -> object:
    arguments = get_args(hint)
    if NoneType in arguments:
        return None
    if get_origin(hint) in (Annotated, tuple):
        return ()
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return example(hint)
    return next(iter(hint)) if issubclass(hint, Enum) else _EXAMPLES[hint]
