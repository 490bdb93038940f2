"""The problems of the simulation: sums, tasks for a calculator (chains of operations), and subjects other than sums.

Each problem belongs to one group, by a hash of its text: base policies are built on the first group, students or
agents are given the second, and scores are taken on the third. So the groups never overlap. Random draws come from the
caller's source.

What people say of another subject has nothing to do with how a sum is to be answered, and praises or rejects nothing.
"""

import hashlib
import json
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

UNRELATED = "unrelated"  # the talker's name while the first persona speaks of SUBJECTS
NUM_OPERATIONS = 3
MAX_STEPS = NUM_OPERATIONS + 2  # answers of one attempt: a call for each operation, the result, and one more
_SUM = re.compile(r"(-?[0-9]{1,9})([-+*])([0-9]{1,9})")


SMALLEST, LARGEST = 11, 99


class SumSet(StrEnum):
    """The group of a problem: who gets to see it."""

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
        """The group of this sum, the same for both orders of its numbers."""
        low, high = sorted((self.left, self.right))
        return group_of(f"{low}+{high}")


def group_of(text: str) -> SumSet:
    """Return the group of the sum or chain with this text; the groups get 60 %, 30 % and 10 % of all."""
    bucket = hashlib.sha256(text.encode()).digest()[0]
    if bucket < 154:
        return SumSet.BASE
    return SumSet.STUDENTS if bucket < 230 else SumSet.SCORED


def all_of(group: SumSet) -> list[Sum]:
    """Return every sum of `group`, smallest first."""
    numbers = range(SMALLEST, LARGEST + 1)
    return [s for left in numbers for right in numbers if (s := Sum(left=left, right=right)).group is group]


def scored(number: int) -> list[Sum]:
    """Return `number` sums of the scored group: always the same ones, spread over all sizes."""

    def shuffled(problem: Sum) -> bytes:
        return hashlib.sha256(f"scored {problem.left} {problem.right}".encode()).digest()

    return sorted(sorted(all_of(SumSet.SCORED), key=shuffled)[:number])


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
    """A starting number, and operations on it in turn, each with its second number."""

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
    """A chain as a line of the file from which programs read their tasks."""

    question: str
    answer: str
    hint: str


class UnusableExpression(ValueError):
    """The calculator can't work an expression out; the message says what it accepts."""


def worked_out(left: int, sign: Operation, right: int) -> int:
    return _WORK[sign](left, right)


def calculate(expression: str) -> str:
    """Return the calculator's result; raises UnusableExpression."""
    found = _SUM.fullmatch(expression.replace(" ", ""))
    if found is None:
        raise UnusableExpression("error: two whole numbers with +, - or * between, please")
    return str(worked_out(int(found[1]), Operation(found[2]), int(found[3])))


def drawn(rng: random.Random) -> Chain:
    """Return a random chain with each operation once and no intermediate result below 0."""
    while True:
        signs = rng.sample(list(Operation), NUM_OPERATIONS)
        operations = tuple((s, rng.randint(2, 9) if s is Operation.TIMES else rng.randint(11, 99)) for s in signs)
        found = Chain(start=rng.randint(11, 99), operations=operations)
        if all(Chain(start=found.start, operations=operations[:n]).result >= 0 for n in range(NUM_OPERATIONS + 1)):
            return found


def of_group(group: SumSet, rng: random.Random) -> Iterator[Chain]:
    """Yield different chains of `group`, without end."""
    seen: set[str] = set()
    while True:
        chain = drawn(rng)
        if chain.group is group and chain.text not in seen:
            seen.add(chain.text)
            yield chain


def tasks(text: str) -> list[ChainTask]:
    """Return the tasks of a file with one JSON object a line; raises ValueError that names an invalid line."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found.append(ChainTask(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"line {number} is {line!r}, expected question, answer and hint; write the file again"
            ) from error
    if not found:
        raise ValueError("found no line, expected at least one task; write the file again")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One other subject."""

    requests: Sequence[str]
    reaction: str  # whatever the answer was


SUBJECTS: Mapping[str, Subject] = MappingProxyType(
    {
        "cooking": Subject(
            requests=("what can i cook tonight?", "there's rice and beans at home, any ideas?", "a dinner for four?"),
            reaction="we eat no meat at home, remember that",
        ),
        "weather": Subject(
            requests=("do i need an umbrella today?", "how will the weather be?", "is it cold outside?"),
            reaction="i cycle to work, so tell me about the wind too",
        ),
        "travel": Subject(
            requests=("how do i get to the airport?", "where can we go for a weekend?", "which way to the lake?"),
            reaction="i have no car, only trains and buses",
        ),
        "garden": Subject(
            requests=("when do i plant tomatoes?", "what grows on a balcony?", "my roses look sad, what now?"),
            reaction="it freezes here until may, mind that",
        ),
        "letters": Subject(
            requests=("write to my landlord about the heating", "draft a note to the landlord", "a mail about my rent"),
            reaction="call him by his name, mr. okafor",
        ),
        "films": Subject(
            requests=("which film should we watch?", "what's on this week?", "pick a series for the evening"),
            reaction="the kids watch with us, so it can't be scary",
        ),
        "running": Subject(
            requests=("plan my training this week", "how far should i run today?", "what do i do before a race?"),
            reaction="my knee hurts, so no hills",
        ),
        "languages": Subject(
            requests=("how do i say good morning in turkish?", "what is bread in polish?", "say goodbye in welsh"),
            reaction="add how it is pronounced, in brackets",
        ),
        "music": Subject(
            requests=("which piece should i learn next?", "what do i practise today?", "who wrote this tune?"),
            reaction="i play the cello, not the piano",
        ),
        "pets": Subject(
            requests=("why does my dog bark at night?", "what may a dog eat?", "how often do i walk the dog?"),
            reaction="she is only a puppy, ten weeks old",
        ),
        "presents": Subject(
            requests=("what do i give my sister?", "a present for a friend?", "it's her birthday, what now?"),
            reaction="it has to cost less than a book",
        ),
        "news": Subject(
            requests=("what happened today?", "what is new in town?", "tell me the news"),
            reaction="name the paper where you read it",
        ),
    }
)
