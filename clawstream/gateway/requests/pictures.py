"""Puts marks in place of a request's pictures, in the forms of OpenAI and Anthropic, and lets no other mark in. Pure.

A picture comes as base64, in a data: URL or in a source. What lies at another address is not fetched: this machine
would ask there in the name of whoever asks it. A picture that a camera turned is turned back, as the model's processor
and the engine need not agree on which side is up.

Text reaches a conversation by many ways, such as documents. So each mark is first sealed by a word that is drawn for
the request, and once the request was read, the marks with the seal count and no others. What a request goes on from is
sealed too. The texts of people and tools are looked at; nowhere else a template shows a mark (rendering/history.py).
"""

import base64
import binascii
import hashlib
import io
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from PIL import ExifTags, Image, UnidentifiedImageError

from clawstream.conversation.messages import Message
from clawstream.conversation.pictures import Picture, Sight, has_mark_character, sealed, unsealed, without_marks
from clawstream.gateway.requests.fields import BadRequest, to_json
from clawstream.gateway.requests.wire import ChatRequest

MOST_PICTURES = 64  # of a request
MOST_PIXELS = 50_000_000  # of a request's pictures, those that come twice counted once
_TURNED_QUALITY = 95  # of a photograph that is written again
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_TEXT_OF = {"image_url": "text", "image": "text", "input_image": "input_text"}  # by a picture's type, that of a text
_MAY_SHOW = ("user", "tool", None)  # by role; an output of the Responses API has none
_UNREADABLE = (  # what Pillow raises at files that are no pictures, or odd ones
    UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError, TypeError, AttributeError,
    LookupError, EOFError, ArithmeticError, struct.error,
)  # fmt: skip
_TURNED: Mapping[int, Image.Transpose] = {  # by EXIF's orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPicture:
    """A picture that a client sent, with its bytes."""

    picture: Picture
    data: bytes


@dataclass(slots=True)
class _Marking:
    sight: Sight
    seal: str
    by_address: dict[str, ShownPicture] = field(default_factory=dict)
    num: int = 0

    def message(self, value: Any, where: str) -> Any:
        """Return a message, or an item of the Responses API, with a mark in place of each picture."""
        if not isinstance(value, Mapping) or value.get("role") not in _MAY_SHOW:
            return value
        return {
            key: self._parts(held, f"{where}.{key}") if key in ("content", "output") else held
            for key, held in value.items()
        }

    def _parts(self, parts: Any, where: str) -> Any:
        if not isinstance(parts, list):
            return parts
        return [self._part(part, f"{where}[{number}]") for number, part in enumerate(parts)]

    def _part(self, part: Any, where: str) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "tool_result" and isinstance(part.get("content"), list):
            inner = part["content"]
            return {**part, "content": [self._shown(one, f"{where}.content[{n}]") for n, one in enumerate(inner)]}
        return self._shown(part, where)

    def _shown(self, part: Any, where: str) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in _TEXT_OF:
            return part
        address = _address(kind, part, where)
        return part if address is None else {"type": _TEXT_OF[kind], "text": self._mark(address, where)}

    def _mark(self, address: str, where: str) -> str:
        self.num += 1
        if self.num > MOST_PICTURES:
            raise BadRequest(f"There are over {MOST_PICTURES} pictures; expected at most that.", param=where)
        if address not in self.by_address:
            self.by_address[address] = _read(address, where, self.sight)
            pixels = sum(one.picture.width * one.picture.height for one in self.by_address.values())
            if pixels > MOST_PIXELS:
                raise BadRequest(
                    f"Up to {where} there are pictures of {pixels} pixels; expected at most {MOST_PIXELS}.", param=where
                )
        return sealed(self.by_address[address].picture.mark, self.seal)


def shows(body: Mapping[str, Any]) -> bool:
    """Whether any part of a body may be a picture."""
    said = (one for key in ("messages", "input") if isinstance(body.get(key), list) for one in body[key])
    held = (one.get(key) for one in said if isinstance(one, Mapping) for key in ("content", "output"))
    parts = [part for listed in held if isinstance(listed, list) for part in listed if isinstance(part, Mapping)]
    inner = (one for part in parts if isinstance(part.get("content"), list) for one in part["content"])
    return any(isinstance(part, Mapping) and part.get("type") in tuple(_TEXT_OF) for part in (*parts, *inner))


def with_marks(body: Mapping[str, Any], sight: Sight, seal: str) -> tuple[dict[str, Any], tuple[ShownPicture, ...]]:
    """Return the body with sealed marks in place of its pictures, and the pictures, each once. Raises BadRequest."""
    marking, marked = _Marking(sight, seal), dict(body)
    for key in ("messages", "input"):
        if isinstance(said := body.get(key), list):
            marked[key] = [marking.message(one, f"{key}[{number}]") for number, one in enumerate(said)]
    return marked, tuple({one.picture.sha256: one for one in marking.by_address.values()}.values())


def with_sealed_marks(messages: Iterable[Message], seal: str) -> tuple[Message, ...]:
    """Return recorded messages with their marks sealed, so that `with_true_marks` keeps them."""
    return tuple(_with_texts(message, partial(sealed, seal=seal)) for message in messages)


def with_true_marks(chat: ChatRequest, seal: str) -> ChatRequest:
    """Return the request with the marks that were sealed, in texts of people and tools, and with no other in a text."""
    if not any(map(has_mark_character, chat.messages_json)):
        return chat
    messages = tuple(
        _with_texts(message, partial(unsealed, seal=seal) if message.get("role") in _MAY_SHOW else without_marks)
        for message in chat.messages
    )
    return replace(chat, messages=messages, messages_json=tuple(map(to_json, messages)))


def _with_texts(message: Message, change: Callable[[str], str]) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(content)}
    if not isinstance(content, list):
        return message
    parts = [{**part, "text": change(part["text"])} if isinstance(part.get("text"), str) else part for part in content]
    return {**message, "content": parts}


def _address(kind: str, part: Mapping[str, Any], where: str) -> str | None:
    """Return a picture's data: URL or other address; None: the part is malformed, and is refused for that later."""
    held = part.get("source" if kind == "image" else "image_url")
    if part.get("file_id") is not None or (isinstance(held, Mapping) and held.get("type") == "file"):
        raise BadRequest(
            f"{where} is a picture by the id of a file, and there are no files here; send it in base64.",
            code="unsupported_content", param=where,
        )  # fmt: skip
    if isinstance(held, str):
        return held
    if not isinstance(held, Mapping):
        return None
    if held.get("type") == "base64":
        return f"data:{held.get('media_type')};base64,{held.get('data')}"
    address = held.get("url")
    return address if isinstance(address, str) else None


def _read(address: str, where: str, sight: Sight) -> ShownPicture:
    begin = _DATA_URL.match(address)
    if begin is None:
        raise BadRequest(
            f"{where} is a picture at {address[:60]!r}, and this gateway fetches none; expected a data: URL, base64.",
            code="unsupported_content", param=where,
        )  # fmt: skip
    try:
        data = base64.b64decode(address[begin.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"{where} is no picture in base64: {error}.", param=where) from error
    data, (width, height) = _upright(data, where)
    picture = Picture(sha256=hashlib.sha256(data).hexdigest(), width=width, height=height)
    if not sight.takes(picture):
        raise BadRequest(f"{where} is a picture of {width}x{height} pixels, too narrow for the policy.", param=where)
    return ShownPicture(picture=picture, data=data)


def _upright(data: bytes, where: str) -> tuple[bytes, tuple[int, int]]:
    """Return the picture's bytes, turned if it says that it lies on a side, and its width and height."""
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.width * image.height > MOST_PIXELS:
            size = f"{image.width}x{image.height}"
            raise BadRequest(f"{where} is a picture of {size} pixels; expected at most {MOST_PIXELS}.", param=where)
        # Of a PNG the orientation is looked for in all of its pixels.
        told = image.format != "PNG" or b"eXIf" in data
        turn = _TURNED.get(image.getexif().get(ExifTags.Base.Orientation, 1)) if told else None
        if turn is None:
            return data, image.size
        turned, written = image.convert("RGB").transpose(turn), io.BytesIO()
        turned.save(written, format="JPEG", quality=_TURNED_QUALITY)
    except _UNREADABLE as error:
        raise BadRequest(f"{where} is no picture in {', '.join(_FORMATS)}: {error}.", param=where) from error
    return written.getvalue(), turned.size


def check_whole(shown: ShownPicture) -> None:
    """Raise BadRequest where the file breaks off, or can't be decoded to its end."""
    try:
        Image.open(io.BytesIO(shown.data), formats=_FORMATS).load()
    except _UNREADABLE as error:
        size = f"{shown.picture.width}x{shown.picture.height}"
        raise BadRequest(f"A picture of {size} pixels can't be decoded: {error}.", param="messages") from error
