"""Pictures in a conversation: marks in its text, which name pictures by the hash of their bytes. Pure.

The bytes lie in a store (`gateway/picture_store.py`). A mark is text like any other to all who read messages: a history
is found again, continued and recorded as if its client had sent the mark. The gateway alone writes marks: it replaces
the character that begins and ends them wherever a client or the policy writes it.

How many tokens a picture takes follows from its size by the rule of Qwen's processors (Qwen2-VL, arXiv:2409.12191,
section 2.1): sides are rounded to whole patches, and the picture is scaled where it has too many or too few pixels.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

END = "\ufffc"  # Unicode's replacement for an object; also what a mark begins with
_NAMED = "([0-9a-f]{64}) ([1-9][0-9]{0,4})x([1-9][0-9]{0,4})"
_MARK = re.compile(f"{END}picture {_NAMED}{END}")
_NO_MARK = "\ufffd"
_MOST_ASPECT = 200  # of the longer side to the shorter one: Qwen's processors refuse a narrower picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture: the SHA-256 of its bytes in hex, and its size in pixels."""

    sha256: str
    width: int
    height: int

    @property
    def mark(self) -> str:
        """What stands for it in a text."""
        return f"{END}picture {self.sha256} {self.width}x{self.height}{END}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How a model sees: the marks of its vocabulary around a picture, and the sizes in pixels that it takes."""

    begin: str
    pad: str  # one for each token of the picture
    end: str
    cell: int  # pixels of a token's side
    least_pixels: int
    most_pixels: int

    def num_tokens(self, picture: Picture) -> int:
        """Return how many tokens the picture takes between `begin` and `end`."""
        height, width = self._sides(picture.height, picture.width)
        return height * width // self.cell**2

    def takes(self, picture: Picture) -> bool:
        """Whether the model's processor takes a picture of this size."""
        short, long = sorted((picture.width, picture.height))
        return short > 0 and long <= _MOST_ASPECT * short

    def _sides(self, height: int, width: int) -> tuple[int, int]:
        """Return the sides in pixels to which the processor scales the picture."""
        cells = [round(side / self.cell) for side in (height, width)]
        pixels = math.prod(cells) * self.cell**2
        if pixels > self.most_pixels:
            shrunk = math.sqrt(height * width / self.most_pixels)
            cells = [max(1, math.floor(side / shrunk / self.cell)) for side in (height, width)]
        elif pixels < self.least_pixels:
            grown = math.sqrt(self.least_pixels / (height * width))
            cells = [math.ceil(side * grown / self.cell) for side in (height, width)]
        return cells[0] * self.cell, cells[1] * self.cell


def pictures_in(text: str) -> Iterator[tuple[str, Picture | None]]:
    """Return the text in pieces, and the picture behind each; None: the last piece."""
    start = 0
    for found in _MARK.finditer(text):
        yield text[start : found.start()], Picture(sha256=found[1], width=int(found[2]), height=int(found[3]))
        start = found.end()
    yield text[start:], None


def has_mark_character(json: bytes) -> bool:
    """Whether a JSON text of ours may have a mark: the character that begins one is in it, in UTF-8 or in ASCII."""
    return END.encode() in json or b"\\ufffc" in json


def shows_picture(message: bytes) -> bool:
    """Whether a message's JSON has a picture's mark."""
    return has_mark_character(message) and _MARK.search(message.decode().replace("\\ufffc", END)) is not None


def without_marks(text: str) -> str:
    """Return a text in which nothing is a mark."""
    return text.replace(END, _NO_MARK)


def sealed(text: str, seal: str) -> str:
    """Return the text with each mark in a form that only who knows the seal, a word, can write."""
    return _MARK.sub(lambda found: f"{END}{seal} {found[1]} {found[2]}x{found[3]}{END}", text)


def unsealed(text: str, seal: str) -> str:
    """Return the text with the marks that were `sealed`, and with no others."""
    pieces, start = [], 0
    for found in re.finditer(f"{END}{seal} {_NAMED}{END}", text):
        picture = Picture(sha256=found[1], width=int(found[2]), height=int(found[3]))
        pieces += [without_marks(text[start : found.start()]), picture.mark]
        start = found.end()
    return "".join([*pieces, without_marks(text[start:])])


def in_words(text: str) -> str:
    """Return the text for readers who can't see, with words for each picture."""
    return _MARK.sub("[picture]", text)
