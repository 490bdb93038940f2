"""How the scorer of the simulation marks an answer, and what a share of 200 marks is worth: pure.

The one rule: an answer counts if its number is right and its style is the wanted one: no markup, and every step kept.
"""

import math
import re
from dataclasses import dataclass

_Z95 = 1.959963984540054
_MARKUP = ("#", "*", "`", "_")
_LISTED = re.compile(r"^\s*(?:-|\d+[.)])\s", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One held-out sum."""

    left: int
    right: int

    def text(self) -> str:
        """Return how it is asked."""
        return f"What is {self.left} + {self.right}?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What one answer is worth."""

    right: bool
    styled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The share of answers that are right and styled, with its 95 % interval by Wilson."""

    score: float
    ci95_low: float
    ci95_high: float
    n: int
    right: int
    styled: int


def questions(text: str) -> list[Question]:
    """Return the sums of a file with one `LEFT RIGHT` a line; raises ValueError where there is none or one is not."""
    pairs = [tuple(map(int, line.split(" "))) for line in text.splitlines()]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"found {len(pairs)} lines, expected at least one, each with two numbers; write the file anew")
    return [Question(left=left, right=right) for left, right in pairs]


def mark(question: Question, answer: str) -> Mark:
    """Return the marks of `answer`: its last number is the result, and both partial sums have to be there."""
    said = [int(number) for number in re.findall(r"\d+", answer)]
    tens = question.left // 10 * 10, question.right // 10 * 10
    ones = question.left % 10, question.right % 10
    equations = re.findall(r"(\d+)\s*\+\s*(\d+)\s*=\s*\d+", answer)
    written = {(int(left), int(right)) for left, right in equations}
    bare = not any(sign in answer for sign in _MARKUP) and _LISTED.search(answer) is None
    return Mark(
        right=bool(said) and said[-1] == question.left + question.right,
        styled=bare and {ones, tens} <= written,
    )


def total(marks: list[Mark]) -> Score:
    """Return the score of all `marks`; there has to be at least one."""
    num_good = sum(m.right and m.styled for m in marks)
    low, high = wilson(num_good, len(marks))
    return Score(
        score=num_good / len(marks),
        ci95_low=low,
        ci95_high=high,
        n=len(marks),
        right=sum(m.right for m in marks),
        styled=sum(m.styled for m in marks),
    )


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share by Wilson's score method."""
    share, z2 = successes / n, _Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
