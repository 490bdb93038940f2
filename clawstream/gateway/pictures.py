"""What stands in a conversation for a picture, since the policy reads text alone. Pure.

The one rule: the words are the same in each request, and the picture itself goes no further than here, so that a
history is recorded, found again and gone on from as if its client had sent the words. They are those that OpenClaw
puts in a picture's place for a model without eyes; pictures in a row are one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from clawstream.gateway.fields import kind
from clawstream.gateway.refusal import BadRequest

SHOWN_BY_THE_USER = "(image omitted: model does not support images)"
SHOWN_BY_A_TOOL = "(tool image omitted: model does not support images)"
PICTURES: Mapping[str, str] = {"image_url": "image_url", "image": "source"}  # by type, where the picture itself stands


def with_words(parts: Iterable[Mapping[str, Any]], words: str) -> list[dict[str, Any]]:
    """Return the parts, `words` as a text part in the place of pictures."""
    found: list[dict[str, Any]] = []
    before = ""
    for part in parts:
        is_picture = part["type"] in PICTURES
        if not is_picture:
            found.append(dict(part))
        elif before not in PICTURES:
            found.append({"type": "text", "text": words})
        before = part["type"]
    return found


def check_picture(part: Mapping[str, Any], where: str) -> None:
    """Raise BadRequest for a picture that is none."""
    key = PICTURES[part["type"]]
    found = part.get(key)
    if not (isinstance(found, str | dict) and found):
        raise BadRequest(f"{where}.{key} is {kind(found)}; expected the picture, as an object.", param=where)
