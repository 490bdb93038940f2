"""The sums and the calculator's tasks that the simulation talks about, and who may see which.

A hash of the sum alone decides its group, so the sums that base policies are built on, those that students ask and the
scored ones never overlap.

A hash of a chain alone decides its group, so the chains that the base policy is built on, those that agents are asked
and the scored ones never overlap. All chance is the caller's.
"""

import hashlib
import json
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

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


NUM_OPERATIONS = 3
MAX_STEPS = NUM_OPERATIONS + 2  # answers of one attempt: a call each, the result, and one too many
_SUM = re.compile(r"(-?[0-9]{1,9})([-+*])([0-9]{1,9})")


class Operation(StrEnum):
    ADD = "+"
    TIMES = "*"
    MINUS = "-"


_WORK: Mapping[Operation, Callable[[int, int], int]] = MappingProxyType(
    {Operation.ADD: operator.add, Operation.TIMES: operator.mul, Operation.MINUS: operator.sub}
)
NAMES = {Operation.ADD: "add", Operation.TIMES: "times", Operation.MINUS: "minus"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A number, and each operation in turn with its other number."""

    start: int
    operations: tuple[tuple[Operation, int], ...]

    @property
    def text(self) -> str:
        """The chain as a question."""
        return ", ".join((f"Take {self.start}", *(f"{NAMES[sign]} {number}" for sign, number in self.operations)))

    @property
    def result(self) -> int:
        """The right answer."""
        found = self.start
        for sign, number in self.operations:
            found = worked_out(found, sign, number)
        return found

    @property
    def group(self) -> SumSet:
        return group_of(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainTask:
    """A chain as it is written for the programs that ask it."""

    question: str
    answer: str
    hint: str


class UnusableExpression(ValueError):
    """The calculator can't work it out; its text says what it takes."""


def worked_out(left: int, sign: Operation, right: int) -> int:
    return _WORK[sign](left, right)


def calculate(expression: str) -> str:
    """Return the calculator's result; raises UnusableExpression."""
    found = _SUM.fullmatch(expression.replace(" ", ""))
    if found is None:
        raise UnusableExpression("error: two whole numbers with +, - or * between, please")
    return str(worked_out(int(found[1]), Operation(found[2]), int(found[3])))


def drawn(rng: random.Random) -> Chain:
    """Return a chain with each operation once; no number on the way is below 0."""
    while True:
        signs = rng.sample(list(Operation), NUM_OPERATIONS)
        operations = tuple((s, rng.randint(2, 9) if s is Operation.TIMES else rng.randint(11, 99)) for s in signs)
        found = Chain(start=rng.randint(11, 99), operations=operations)
        if all(Chain(start=found.start, operations=operations[:n]).result >= 0 for n in range(NUM_OPERATIONS + 1)):
            return found


def of_group(group: SumSet, rng: random.Random) -> Iterator[Chain]:
    """Yield different chains of `group`, for as long as they are wanted."""
    seen: set[str] = set()
    while True:
        chain = drawn(rng)
        if chain.group is group and chain.text not in seen:
            seen.add(chain.text)
            yield chain


def tasks(text: str) -> list[ChainTask]:
    """Return the tasks of a file with one JSON object a line; raises ValueError naming the line that is not."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found.append(ChainTask(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"line {number} is {line!r}, expected question, answer and hint; write the file anew"
            ) from error
    if not found:
        raise ValueError("found no line, expected at least one task; write the file anew")
    return found
