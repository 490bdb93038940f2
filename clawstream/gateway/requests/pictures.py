"""Puts marks in place of a request's pictures, in the forms of OpenAI and Anthropic. Pure.

A picture comes as base64, in a data: URL or in a source. What lies at another address is not fetched: this machine
would ask there in the name of whoever asks it. A picture that a camera turned is turned back, as the model's processor
and the engine need not agree on which side is up.
"""

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from clawstream.conversation.pictures import Picture, Sight, without_marks
from clawstream.gateway.requests.fields import BadRequest

MOST_PICTURES = 64  # of a request
MOST_PIXELS = 50_000_000
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_SAID = ("messages", "input", "system", "instructions")  # where clients say something to the policy
_TEXT_OF = {"image_url": "text", "image": "text", "input_image": "input_text"}  # by a picture's type, that of a text


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPicture:
    """A picture that a client sent, with its bytes."""

    picture: Picture
    data: bytes


@dataclass(slots=True)
class _Marking:
    sight: Sight
    shown: dict[str, ShownPicture]
    num: int = 0

    def walked(self, value: Any, where: str) -> Any:
        """Return the value with a mark in place of each picture, and with no other marks."""
        if isinstance(value, str):
            return without_marks(value)
        if isinstance(value, list):
            return [self.walked(item, f"{where}[{number}]") for number, item in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        kind = value.get("type")
        if isinstance(kind, str) and kind in _TEXT_OF and (address := _address(kind, value)) is not None:
            return {"type": _TEXT_OF[kind], "text": self._mark(address, where)}
        return {key: self.walked(item, f"{where}.{key}") for key, item in value.items()}

    def _mark(self, address: str, where: str) -> str:
        self.num += 1
        if self.num > MOST_PICTURES:
            raise BadRequest(f"There are over {MOST_PICTURES} pictures; expected at most that.", param=where)
        found = _read(address, where, self.sight)
        self.shown[found.picture.sha256] = found
        return found.picture.mark


def with_marks(body: Mapping[str, Any], sight: Sight) -> tuple[dict[str, Any], tuple[ShownPicture, ...]]:
    """Return the body with marks in place of its pictures, and the pictures, each once. Raises BadRequest."""
    marking = _Marking(sight, {})
    marked = {key: marking.walked(value, key) if key in _SAID else value for key, value in body.items()}
    return marked, tuple(marking.shown.values())


def _address(kind: str, part: Mapping[str, Any]) -> str | None:
    """Return a picture's data: URL or other address; None: the part is malformed, and is refused for that later."""
    held = part.get("source" if kind == "image" else "image_url")
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
            raise BadRequest(
                f"{where} is a picture of {image.width}x{image.height} pixels; expected at most {MOST_PIXELS}.",
                param=where,
            )
        if image.getexif().get(ExifTags.Base.Orientation, 1) == 1:
            return data, image.size
        turned = ImageOps.exif_transpose(image)
        written = io.BytesIO()
        turned.save(written, format="PNG")
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise BadRequest(f"{where} is no picture in {', '.join(_FORMATS)}: {error}.", param=where) from error
    return written.getvalue(), turned.size
