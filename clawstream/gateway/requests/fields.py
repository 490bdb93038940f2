"""Reads a field of a client's JSON by its type and limits, or refuses it by its name; the refusals. Pure.

Pictures and documents of a conversation are replaced by words, since the policy reads text alone. The words are the
same in each request, and the picture goes no further than here. So a history is recorded, found again and continued as
if its client had sent the words. OpenClaw writes the same words for a model that can't see; pictures in a row become
one text. A document that is text becomes that text, without its title; any other document becomes words.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import orjson

from clawstream.conversation.messages import dump
from clawstream.errors import ClawstreamError

_MAX_LABELS = 16
_MAX_LABEL_NAME = 64
_MAX_LABEL = 512
T = TypeVar("T")
MOST = 2**63 - 1  # the largest whole number that a record holds
_READ_AS_FLOAT = 2.0**63  # whole numbers from here on, and below minus that, are not read exactly
_KINDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
_NAME = re.compile(r"[!-~]{1,200}")
SHOWN_BY_THE_USER = "(image omitted: model does not support images)"
SHOWN_BY_A_TOOL = "(tool image omitted: model does not support images)"
PICTURES: Mapping[str, str] = {"image_url": "image_url", "image": "source"}  # by type, the key that has the picture
DOCUMENTS: Mapping[str, str] = {"file": "file", "document": "source"}
_UNREADABLE = {words: words.replace("image", "document") for words in (SHOWN_BY_THE_USER, SHOWN_BY_A_TOOL)}
_TEXT_IN_URL = re.compile(r"data:text/[^,]*;base64,")


class BadRequest(ClawstreamError):
    """The request is refused with `status`, as OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.allow = allow

    def as_json(self) -> bytes:
        """Return OpenAI's error object."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return to_json({"error": error})


class TooLong(BadRequest):
    """The conversation does not fit into the context, in the words that clients of OpenAI's API recognise.

    `prompt_tokens` is None where the refusal came before tokenizing.
    """

    def __init__(self, found: str, context_length_tokens: int, *, prompt_tokens: int | None = None) -> None:
        super().__init__(
            f"This model's maximum context length is {context_length_tokens} tokens, the answer included. Input "
            f"tokens exceed the configured limit: {found}. Shorten the conversation.",
            code="context_length_exceeded",
            param="messages",
        )
        self.found = found
        self.context_length_tokens = context_length_tokens
        self.prompt_tokens = prompt_tokens


def unsupported(param: str, found: object, expected: str) -> BadRequest:
    """Return the refusal of a field's value that OpenAI's API supports and this gateway does not."""
    return BadRequest(
        f"{param} is {json.dumps(found)[:100]}, which is not supported; expected {expected}.",
        code="unsupported_value",
        param=param,
    )


def to_json(value: Any) -> bytes:
    """Return `value` as JSON, in ASCII where it holds lone surrogates."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return dump(value)


def typed(found: object, type_: type[T], where: str) -> T | None:
    """Return the value, which has to be of this type, or None where it is absent. Raises BadRequest."""
    if found is not None and not isinstance(found, type_):
        raise wrong(where, found, _KINDS[type_])
    return found


def boolean(body: Mapping[str, Any], key: str) -> bool:
    """Return a flag; absent is false."""
    return typed(body.get(key), bool, key) is True


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


def number(body: Mapping[str, Any], key: str, low: float, high: float, *, limits: str | None = None) -> float | None:
    """Return a number within its limits, which `limits` may say in other words, or None where it is absent."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        expected = limits or f"{low} to {high}"
        raise BadRequest(f"{key} is {json.dumps(value)[:100]}; expected a number, {expected}.", param=key)
    return float(value)


def text(body: Mapping[str, Any], key: str) -> str | None:
    """Return a string, or None where it is absent or empty."""
    return typed(body.get(key), str, key) or None


def check_name(name: str, where: str, *, param: str | None = None) -> str:
    """Return the name of a session or the like. Raises BadRequest for an unusable one."""
    if not _NAME.fullmatch(name):
        found = f"{where} is {name[:50]!r}"
        raise BadRequest(f"{found}; expected 1 to 200 printable ASCII characters without spaces.", param=param or where)
    return name


def mapping(body: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object; absent is empty."""
    return typed(body.get(key), dict, key) or {}


def labels(body: Mapping[str, Any], key: str) -> Mapping[str, str]:
    """Return an object of labels within OpenAI's limits: 16 pairs, keys of 64 and values of 512 characters."""
    found = mapping(body, key)
    if len(found) > _MAX_LABELS:
        raise too_many(f"{key} has {len(found)} pairs", _MAX_LABELS, key)
    for name, value in found.items():
        where = f"{key}.{name}"
        if len(name) > _MAX_LABEL_NAME:
            raise too_many(f"{key} has a key of {len(name)} characters", _MAX_LABEL_NAME, key)
        if not isinstance(value, str):
            raise wrong(where, value, "a string")
        if len(value) > _MAX_LABEL:
            raise too_many(f"{where} has {len(value)} characters", _MAX_LABEL, where)
    return found


def too_many(found: str, most: int, param: str) -> BadRequest:
    """Return the refusal of a value that is longer than `most`, or has more parts."""
    return BadRequest(f"{found}; expected at most {most}.", param=param)


def items(found: object, where: str) -> list[Any]:
    """Return a list; absent is empty."""
    return typed(found, list, where) or []


def wrong(where: str, found: object, expected: str, *, param: str | None = None) -> BadRequest:
    """Return the refusal of a value that is of another kind than `expected`."""
    return BadRequest(f"{where} is {kind(found)}; expected {expected}.", param=param or where)


def kind(value: object) -> str:
    """Return the kind of a value, in words for a message."""
    if value is None:
        return "missing"
    name = _KINDS.get(type(value), "something else")
    return f"{name} that is empty" if value in ("", [], {}) else name


def with_words(parts: Iterable[Mapping[str, Any]], words: str) -> list[dict[str, Any]]:
    """Return the parts, with `words` as a text part in place of pictures, and text in place of documents.

    Raises BadRequest for a document whose text can't be read.
    """
    found: list[dict[str, Any]] = []
    before = ""
    for part in parts:
        is_picture = part["type"] in PICTURES
        if part["type"] in DOCUMENTS:
            found.append({"type": "text", "text": _read(part, words)})
        elif not is_picture:
            found.append(dict(part))
        elif before not in PICTURES:
            found.append({"type": "text", "text": words})
        before = part["type"]
    return found


def check_shown(part: Mapping[str, Any], where: str) -> None:
    """Raise BadRequest for a malformed picture or document."""
    is_document = part["type"] in DOCUMENTS
    key = (DOCUMENTS if is_document else PICTURES)[part["type"]]
    found = part.get(key)
    if not (isinstance(found, dict if is_document else str | dict) and found):
        what = "document" if is_document else "picture"
        raise wrong(f"{where}.{key}", found, f"the {what}, as an object", param=where)


def _read(part: Mapping[str, Any], words: str) -> str:
    """Return a document's text, or `words` where it is not text."""
    held = part[DOCUMENTS[part["type"]]]
    if part["type"] == "file":
        data = held.get("file_data")
        begin = _TEXT_IN_URL.match(data) if isinstance(data, str) else None
        return _decoded(data[begin.end() :], "file_data") if begin else _UNREADABLE[words]
    named, data, media = held.get("type"), held.get("data"), held.get("media_type")
    if named == "content":
        return _said(held.get("content"), words)
    if named == "text" and isinstance(data, str):
        return data
    if named == "base64" and isinstance(data, str) and isinstance(media, str) and media.startswith("text/"):
        return _decoded(data, "source.data")
    return _UNREADABLE[words]


def _said(content: object, words: str) -> str:
    """Return the text of a document that is made of blocks."""
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for block in blocks:
        shown = isinstance(block, dict) and block.get("type") == "image"
        if not shown and not (isinstance(block, dict) and isinstance(block.get("text"), str)):
            raise BadRequest("source.content of a document: expected a string, or blocks of text and images.")
    return "".join(part["text"] for part in with_words(blocks, words))


def _decoded(data: str, key: str) -> str:
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise BadRequest(f"{key} of a text document is no text in UTF-8, base64: {error}.") from error
