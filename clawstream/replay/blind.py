"""Which of two answers a person prefers without knowing whose they are, and what the choices show together. Pure."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import comb


class Choice(StrEnum):
    """What a person says of a pair."""

    BEFORE = "before"
    AFTER = "after"
    EQUAL = "equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A request and two answers; the one shown first was drawn by lot."""

    turn_id: str
    request: str
    before: str
    after: str
    after_first: bool

    @property
    def shown(self) -> tuple[str, str]:
        """The answers in the order in which they are shown."""
        return (self.after, self.before) if self.after_first else (self.before, self.after)

    @property
    def is_same(self) -> bool:
        """Whether both answers are the same, so that there is nothing to choose."""
        return self.before == self.after

    def choice(self, letter: str) -> Choice:
        """Return the choice that `letter` means: a, the answer shown first; b; or = for neither."""
        if letter == "=":
            return Choice.EQUAL
        return Choice.AFTER if (letter == "a") == self.after_first else Choice.BEFORE


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrelatedTask:
    """A question that has nothing to do with what people said, and what a right answer holds."""

    question: str
    pattern: str  # a regular expression, whatever the case

    def accepts(self, answer: str) -> bool:
        """Return whether the answer is right."""
        return re.search(self.pattern, answer, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceCounts:
    """How often each version's answer was preferred."""

    after: int = 0
    before: int = 0
    equal: int = 0

    @property
    def decided(self) -> int:
        """The number of pairs of which one answer was preferred."""
        return self.after + self.before

    @property
    def chance(self) -> float | None:
        """The chance of choices this lopsided if both were equally good (two-sided sign test); None: no choice."""
        if self.decided == 0:
            return None
        fewer = min(self.after, self.before)
        tail = sum(comb(self.decided, k) for k in range(fewer + 1)) / 2.0**self.decided
        return min(1.0, 2 * tail)


def tally(choices: Iterable[Choice]) -> PreferenceCounts:
    """Return how often each was chosen."""
    return PreferenceCounts(**{choice.value: count for choice, count in Counter(choices).items()})
