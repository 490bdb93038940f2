"""The sums that the simulation talks about, and who may see which.

A hash of the sum alone decides its group, so the sums that base policies are built on, those that students ask and the
scored ones never overlap.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum

SMALLEST, LARGEST = 11, 99


class SumSet(StrEnum):
    """Who sees a sum."""

    BASE = "base"
    STUDENTS = "students"
    SCORED = "scored"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Sum:
    left: int
    right: int

    @property
    def text(self) -> str:
        return f"{self.left} + {self.right}"

    @property
    def total(self) -> int:
        return self.left + self.right

    @property
    def group(self) -> SumSet:
        """Who sees this sum and its mirror image."""
        low, high = sorted((self.left, self.right))
        return group_of(f"{low}+{high}")


def group_of(text: str) -> SumSet:
    """Return who sees the sum or chain with this text: 60 %, 30 % and 10 % of all."""
    bucket = hashlib.sha256(text.encode()).digest()[0]
    if bucket < 154:
        return SumSet.BASE
    return SumSet.STUDENTS if bucket < 230 else SumSet.SCORED


def all_of(group: SumSet) -> list[Sum]:
    """Return every sum of `group`, smallest first."""
    numbers = range(SMALLEST, LARGEST + 1)
    return [s for left in numbers for right in numbers if (s := Sum(left=left, right=right)).group is group]


def scored(number: int) -> list[Sum]:
    """Return the `number` sums that scores are taken on: always the same, spread over all sizes."""

    def shuffled(problem: Sum) -> bytes:
        return hashlib.sha256(f"scored {problem.left} {problem.right}".encode()).digest()

    return sorted(sorted(all_of(SumSet.SCORED), key=shuffled)[:number])
