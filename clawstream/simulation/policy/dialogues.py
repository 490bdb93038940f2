"""The lessons of the policy that simulates a large one: short conversations about sums, in two styles of answering.

The same random source gives the same conversations. No sum outside the base group is asked. People ask and react as in
`reactions`, and hints include those of `opinions`, so the policy has met their words. PLAIN is the style that the
simulated students want; FORMATTED, with headings and bold, is what the base prefers.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar

from clawstream.simulation import opinions
from clawstream.simulation.problems import Sum
from clawstream.simulation.reactions import MANNERS, REACTIONS, Impression

HINT_MARKER = "[user's hint / instruction]"

QUESTIONS = MANNERS["student"].questions
COMPLAINTS = (*MANNERS["student"].complaints, *REACTIONS[Impression.STEPS_MISSING])
CORRECTIONS = REACTIONS[Impression.WRONG]
THANKS = REACTIONS[Impression.GOOD]
ACKNOWLEDGEMENTS = ("you're welcome!", "no problem!", "any time!")
HINTS = (
    *opinions.HINTS[opinions.Wish.PLAIN],
    *opinions.HABITS["student"].corrections,
    "Use plain text, no headings or bold.",
    "Be casual and keep the steps.",
)
OPENERS = ("ok so ", "sure, ", "")


class Style(StrEnum):
    """The two ways in which the policy answers."""

    PLAIN = "plain"
    FORMATTED = "formatted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A prompt as the client sends it, and the answer to learn."""

    messages: tuple[dict[str, Any], ...]
    answer: str


Kind = Callable[[Sum, random.Random], Dialogue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The shares of each kind of conversation; what is left over is first answers without a hint."""

    words: ClassVar[tuple[str, ...]] = ()  # each is one token, beside characters
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # of the requests

    hinted: float = 0.2
    complaint: float = 0.06
    correction: float = 0.03
    thanks: float = 0.03
    plain: float = 0.23  # of the answers that nobody asked to be plain

    def dialogue(self, problem: Sum, rng: random.Random) -> Dialogue:
        kinds: Sequence[tuple[float, Kind]] = (
            (self.hinted, self._hinted),
            (self.complaint, self._complaint),
            (self.correction, self._correction),
            (self.thanks, self._thanks),
        )
        return kind_at(rng.random(), kinds, self._first)(problem, rng)

    def _first(self, problem: Sum, rng: random.Random) -> Dialogue:
        return conversation(asked(problem, QUESTIONS, rng), answer=answer(problem, self._style(rng), rng))

    def _hinted(self, problem: Sum, rng: random.Random) -> Dialogue:
        question = with_hint(asked(problem, QUESTIONS, rng), rng.choice(HINTS))
        return conversation(question, answer=answer(problem, Style.PLAIN, rng))

    def _complaint(self, problem: Sum, rng: random.Random) -> Dialogue:
        first = answer(problem, Style.FORMATTED, rng)
        said = (asked(problem, QUESTIONS, rng), first, rng.choice(COMPLAINTS))
        return conversation(*said, answer=answer(problem, Style.PLAIN, rng))

    def _correction(self, problem: Sum, rng: random.Random) -> Dialogue:
        style = self._style(rng)
        first = answer(slipped(problem, rng), style, rng)
        said = (asked(problem, QUESTIONS, rng), first, rng.choice(CORRECTIONS))
        return conversation(*said, answer=answer(problem, style, rng))

    def _thanks(self, problem: Sum, rng: random.Random) -> Dialogue:
        first = answer(problem, self._style(rng), rng)
        said = (asked(problem, QUESTIONS, rng), first, rng.choice(THANKS))
        return conversation(*said, answer=rng.choice(ACKNOWLEDGEMENTS))

    def _style(self, rng: random.Random) -> Style:
        return Style.PLAIN if rng.random() < self.plain else Style.FORMATTED


def answer(problem: Sum, style: Style, rng: random.Random) -> str:
    """Return the right answer to `problem`, with all its steps."""
    ones, tens = steps_of(problem)
    if style is Style.FORMATTED:
        return f"## Steps\n**{ones}**\n**{tens}**\n## Answer\n**{problem.total}**"
    return f"{rng.choice(OPENERS)}{ones} and {tens}, so {problem.total}"


def with_hint(content: str, hint: str) -> str:
    """Return the last user message as it reads with `hint` at its end."""
    return f"{content}\n\n{HINT_MARKER}\n{hint}"


def kind_at(drawn: float, kinds: Sequence[tuple[float, Kind]], rest: Kind) -> Kind:
    """Return the kind on which `drawn` falls, where the kinds, and then `rest`, divide 0 to 1 by their shares."""
    for share, kind in kinds:
        if drawn < share:
            return kind
        drawn -= share
    return rest


def conversation(*said: str, answer: str) -> Dialogue:
    """Return the dialogue in which user and assistant say these in turn, the user first and last."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[number % 2], "content": content} for number, content in enumerate(said))
    return Dialogue(messages=messages, answer=answer)


def asked(problem: Sum, wordings: Sequence[str], rng: random.Random) -> str:
    return rng.choice(wordings).format(question=problem.text)


def slipped(problem: Sum, rng: random.Random) -> Sum:
    """Return another sum, as somebody who makes a mistake reads this one."""
    return Sum(left=problem.left, right=problem.right + rng.choice((-10, -1, 1, 10)))


def steps_of(problem: Sum) -> tuple[str, str]:
    (a_tens, a_ones), (b_tens, b_ones) = divmod(problem.left, 10), divmod(problem.right, 10)
    return f"{a_ones}+{b_ones}={a_ones + b_ones}", f"{10 * a_tens}+{10 * b_tens}={10 * (a_tens + b_tens)}"
