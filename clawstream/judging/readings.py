"""Reads a judge's reply. Pure.

The one rule: only the last box after any thinking counts. A reply without a box that the question allows is unreadable,
which is not a score of 0.
"""

import re
from dataclasses import dataclass

from clawstream.events import Question

_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_HINT = re.compile(r"\[HINT_START\](.*?)\[HINT_END\]", re.DOTALL)
_ALLOWED = {Question.SCORE: {-1, 0, 1}, Question.HINT: {-1, 1}}
_SCORES = {"-1": -1, "0": 0, "1": 1, "+1": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteReading:
    """A readable vote; `hint` is None unless the vote was asked for one and gives it."""

    score: int
    hint: str | None


def read(question: Question, text: str) -> VoteReading | None:
    """Return what `text` says to `question`; None where it can't be read."""
    answer = _after_thinking(text)
    boxes = _BOX.findall(answer)
    score = _SCORES.get(boxes[-1].strip().replace("\u2212", "-")) if boxes else None
    if score is None or score not in _ALLOWED[question]:
        return None
    return VoteReading(score=score, hint=_hint(answer) if question is Question.HINT and score == 1 else None)


def _after_thinking(text: str) -> str:
    """Return the text after the thinking; "" where the thinking never ended, since it holds no verdict."""
    _, ended, after = text.rpartition("</think>")
    if ended:
        return after
    return "" if "<think>" in text else text


def _hint(answer: str) -> str | None:
    offered = [block.strip() for block in _HINT.findall(answer)]
    return offered[-1] if offered and offered[-1] else None
