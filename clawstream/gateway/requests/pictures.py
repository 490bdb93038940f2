"""Replaces pictures and documents of a conversation by words, since the policy reads text alone. Pure.

The words are the same in each request, and the picture goes no further than here. So a history is recorded, found again
and continued as if its client had sent the words. OpenClaw writes the same words for a model that can't see; pictures
in a row become one text. A document that is text becomes that text, without its title; any other document becomes
words.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from typing import Any

from clawstream.gateway.requests.fields import BadRequest, wrong

SHOWN_BY_THE_USER = "(image omitted: model does not support images)"
SHOWN_BY_A_TOOL = "(tool image omitted: model does not support images)"
PICTURES: Mapping[str, str] = {"image_url": "image_url", "image": "source"}  # by type, the key that has the picture
DOCUMENTS: Mapping[str, str] = {"file": "file", "document": "source"}
_UNREADABLE = {words: words.replace("image", "document") for words in (SHOWN_BY_THE_USER, SHOWN_BY_A_TOOL)}
_TEXT_IN_URL = re.compile(r"data:text/[^,]*;base64,")


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
