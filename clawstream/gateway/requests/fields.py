"""Fields of a client's JSON, each read with its type and limits or refused by name. Pure."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from clawstream.gateway.requests.refusal import BadRequest

_MAX_LABELS = 16
_MAX_LABEL_NAME = 64
_MAX_LABEL = 512

MOST = 2**63 - 1  # of a whole number, as records hold them
_READ_AS_FLOAT = 2.0**63  # whole numbers from here on, and below minus that, are not read exactly


def boolean(body: Mapping[str, Any], key: str) -> bool:
    """Return a flag; absent is false."""
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{key} is {kind(value)}; expected true or false.", param=key)
    return value is True


def integer(body: Mapping[str, Any], key: str, *, low: int, high: int = MOST) -> int | None:
    """Return a whole number within its limits, or None where it is absent."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < _READ_AS_FLOAT:
        value = int(value)  # JSON has one kind of number: 8.0 is 8
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"{key} is {json.dumps(value)[:100]}; expected an integer from {low} to {high}.", param=key)
    return value


def number(body: Mapping[str, Any], key: str, fits: Callable[[float], bool], limits: str) -> float | None:
    """Return a number that `fits`, or None where it is absent."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise BadRequest(f"{key} is {json.dumps(value)[:100]}; expected a number, {limits}.", param=key)
    return float(value)


def text(body: Mapping[str, Any], key: str) -> str | None:
    """Return a string, or None where it is absent or empty."""
    value = body.get(key)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{key} is {kind(value)}; expected a string.", param=key)
    return value or None


def mapping(body: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object; absent is empty."""
    value = body.get(key)
    if value is not None and not isinstance(value, dict):
        raise BadRequest(f"{key} is {kind(value)}; expected an object.", param=key)
    return value or {}


def labels(body: Mapping[str, Any], key: str) -> Mapping[str, str]:
    """Return an object of labels within OpenAI's limits: 16 pairs, keys of 64 and values of 512 characters."""
    found = mapping(body, key)
    if len(found) > _MAX_LABELS:
        raise BadRequest(f"{key} has {len(found)} pairs; expected at most {_MAX_LABELS}.", param=key)
    for name, value in found.items():
        if len(name) > _MAX_LABEL_NAME:
            shown = f"{key} has a key of {len(name)} characters"
            raise BadRequest(f"{shown}; expected at most {_MAX_LABEL_NAME}.", param=key)
        if not isinstance(value, str):
            raise BadRequest(f"{key}.{name} is {kind(value)}; expected a string.", param=f"{key}.{name}")
        if len(value) > _MAX_LABEL:
            shown = f"{key}.{name} has {len(value)} characters"
            raise BadRequest(f"{shown}; expected at most {_MAX_LABEL}.", param=f"{key}.{name}")
    return found


def items(found: object, where: str) -> list[Any]:
    """Return a list; absent is empty."""
    if found is None:
        return []
    if not isinstance(found, list):
        raise BadRequest(f"{where} is {kind(found)}; expected a list.", param=where)
    return found


def kind(value: object) -> str:
    """Return the kind of a value, in words for a message."""
    if value is None:
        return "missing"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    name = names.get(type(value), "something else")
    return f"{name} that is empty" if value in ("", [], {}) else name
