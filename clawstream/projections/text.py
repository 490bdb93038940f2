"""Any text and any JSON in a form that Postgres can hold, and back. Pure.

Postgres text and jsonb refuse the character NUL and lone surrogates, and conversations contain both. They are stored as
U+241B, a small "u" and four hex digits; U+241B itself is stored that way too, so `unescape(escape(text)) == text` for
every text, and two texts never become one. Export undoes the escape; in SQL it stays visible.
"""

import json
import re
from typing import NoReturn

import orjson

ESCAPE = "\u241b"

_UNSTORABLE = re.compile(f"[\0{ESCAPE}\ud800-\udfff]")
_ESCAPED = re.compile(f"{ESCAPE}u([0-9a-f]{{4}})")
_JSON_TOKEN = re.compile(
    rf"\\u[dD][89abAB][0-9a-fA-F]{{2}}\\u[dD][c-fC-F][0-9a-fA-F]{{2}}|\\u[0-9a-fA-F]{{4}}|\\.|{ESCAPE}"
)
_MAYBE_HUGE = re.compile(r"[0-9](?:[eE][+-]?[0-9]{3}|[0-9]{299})")
_HEX_ESCAPE_LENGTH = len("\\u0000")
_MAX_NUMBER_LENGTH = 4000  # limits digits and the power of ten; jsonb takes 16383 digits after the point


def escape(text: str) -> str:
    """Return `text` in a form that Postgres can hold."""
    return _UNSTORABLE.sub(lambda found: _code(ord(found[0])), text)


def unescape(text: str) -> str:
    """Return the text that `escape` turned into `text`."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)


def storable_json(raw: bytes) -> str:
    """Return JSON that jsonb takes: `raw` with the strings in it escaped.

    Text that jsonb can't hold at all (not JSON, nested too deep, a number out of range) becomes a JSON string.
    """
    text = raw.decode(errors="surrogateescape")
    if ESCAPE in text or "\\u" in text:
        text = _JSON_TOKEN.sub(_escaped_token, text)
    if _fits_jsonb(text):
        return text
    return orjson.dumps(escape(raw.decode(errors="surrogateescape"))).decode()


def original_json(stored: str) -> str:
    """Return the text of a jsonb value in which each string, keys included, is as it was before `storable_json`."""
    return _ESCAPED.sub(r"\\u\1", stored)


def _code(point: int) -> str:
    return f"{ESCAPE}u{point:04x}"


def _escaped_token(found: re.Match[str]) -> str:
    token = found[0]
    if token == ESCAPE:
        return _code(ord(ESCAPE))
    if len(token) != _HEX_ESCAPE_LENGTH:
        return token  # a surrogate pair, or an escape of one letter
    point = int(token[2:], 16)
    return _code(point) if _UNSTORABLE.match(chr(point)) else token


def _fits_jsonb(text: str) -> bool:
    try:
        orjson.loads(text)  # refuses what is not JSON, and more than 1024 levels
        if _MAYBE_HUGE.search(text):
            json.loads(text, parse_int=_bounded, parse_float=_bounded, parse_constant=_refused)
    except (ValueError, RecursionError):
        return False
    return True


def _bounded(number: str) -> None:
    digits, _, power = number.lower().partition("e")
    if len(digits) > _MAX_NUMBER_LENGTH or len(power) > len("+9999") or abs(int(power or 0)) > _MAX_NUMBER_LENGTH:
        raise ValueError(f"a number of {len(number)} characters is too large for jsonb")


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
