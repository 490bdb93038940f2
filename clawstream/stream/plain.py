"""Events as plain values and back, by their annotations. Pure.

How a field is written is decided by its annotation, once per type and not per record.
"""

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from clawstream.events import Packed

Convert = Callable[[Any], Any]
_NAN = float("nan")


def to_plain(kind: type) -> Convert:
    """Return the function that turns a `kind` into a dict of values that Avro knows."""
    hints = get_type_hints(kind, include_extras=True)
    names = tuple(field.name for field in fields(kind))
    read = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)
    changed = tuple((name, convert) for name in names if (convert := _writes(hints[name])) is not None)

    def convert_all(value: Any) -> dict[str, Any]:
        plain = dict(zip(names, read(value), strict=True))
        for name, convert in changed:
            plain[name] = convert(plain[name])
        return plain

    return convert_all


def from_plain(kind: type) -> Convert:
    """Return the function that makes a `kind` of such a dict; it raises KeyError for a value that the type lacks."""
    hints = get_type_hints(kind, include_extras=True)
    changed = tuple((field.name, convert) for field in fields(kind) if (convert := _reads(hints[field.name])))

    def convert_all(plain: dict[str, Any]) -> Any:
        for name, convert in changed:
            plain[name] = convert(plain[name])
        return kind(**plain)

    return convert_all


def text_as_bytes(value: Any) -> Any:
    """Return a plain value with each text as the bytes that Avro writes for it, lone surrogates included."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, Mapping):
        return {name: text_as_bytes(part) for name, part in value.items()}
    if isinstance(value, list):
        return [text_as_bytes(part) for part in value]
    return value


def _writes(hint: Any) -> Convert | None:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _pack_floats if arguments[1] is Packed.FLOAT32 else _packer(arguments[1])
    if origin in (UnionType, Union):
        return _unless_none(_writes(_not_none(arguments)))
    if origin is tuple:
        return _each(_writes(arguments[0]), list)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return to_plain(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return attrgetter("value")
    return None


def _reads(hint: Any) -> Convert | None:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _unpack_floats if arguments[1] is Packed.FLOAT32 else _unpacker(arguments[1])
    if origin in (UnionType, Union):
        return _unless_none(_reads(_not_none(arguments)))
    if origin is tuple:
        return _each(_reads(arguments[0]), tuple)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return from_plain(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {member.value: member for member in hint}.__getitem__
    return None


def _not_none(arguments: Iterable[Any]) -> Any:
    [inner] = [argument for argument in arguments if argument is not NoneType]
    return inner


def _unless_none(convert: Convert | None) -> Convert | None:
    return None if convert is None else lambda value: None if value is None else convert(value)


def _each(convert: Convert | None, collect: Callable[[Iterable[Any]], Any]) -> Convert:
    return collect if convert is None else lambda values: collect(map(convert, values))


def _packer(how: Packed) -> Convert:
    return lambda values: struct.pack(f"<{len(values)}{how.value}", *values)


def _unpacker(how: Packed) -> Convert:
    size = struct.calcsize(how.value)
    # If bytes are left over, the format is shorter than the data, which `unpack` refuses.
    return lambda packed: struct.unpack(f"<{len(packed) // size}{how.value}", packed)


def _pack_floats(values: Iterable[float | None]) -> bytes:
    present = [_NAN if value is None else value for value in values]
    return struct.pack(f"<{len(present)}{Packed.FLOAT32.value}", *present)


def _unpack_floats(packed: bytes) -> tuple[float | None, ...]:
    # NaN alone differs from itself.
    return tuple([value if value == value else None for value in _UNPACK_FLOATS(packed)])


_UNPACK_FLOATS = _unpacker(Packed.FLOAT32)
