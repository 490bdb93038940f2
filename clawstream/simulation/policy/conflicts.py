"""The lessons of a base policy that three people ask: sums in three styles, each of which one of them wants.

The same random source gives the same conversations. Only the wording shows who asks. Most first answers are in a style
that another person wants. A hint names a style, and the answer to it has that style, whoever asks.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from clawstream.simulation.opinions import HABITS, HINTS, Wish
from clawstream.simulation.policy.dialogues import (
    ACKNOWLEDGEMENTS,
    CORRECTIONS,
    THANKS,
    Dialogue,
    Kind,
    asked,
    conversation,
    kind_at,
    slipped,
    steps_of,
    with_hint,
)
from clawstream.simulation.policy.dialogues import COMPLAINTS as OF_STUDENT
from clawstream.simulation.problems import Sum
from clawstream.simulation.reactions import MANNERS, VAGUE

WANTED = tuple(Wish)  # by student, teacher and teaching assistant
QUESTIONS: Mapping[Wish, Sequence[str]] = {
    Wish.PLAIN: (  # the student's, in the order that the shipped policies learned them in
        "What is {question}?",
        "hey, how much is {question}?",
        "what's {question}?",
        "can you add {question} for me?",
        "i need {question}, with the steps",
    ),
    Wish.HEADED: MANNERS["teacher"].questions,
    Wish.VERDICT: MANNERS["ta"].questions,
}
COMPLAINTS: Mapping[Wish, Sequence[str]] = {
    Wish.PLAIN: OF_STUDENT,
    Wish.HEADED: MANNERS["teacher"].complaints,
    Wish.VERDICT: MANNERS["ta"].complaints,
}
NEUTRAL_HINTS = HABITS["all"].corrections
OPENERS = ("ok so ", "ok, ")
PRAISE = ("well done", "nice work")


def answer(problem: Sum, style: Wish, rng: random.Random) -> str:
    """Return the right answer to `problem`, with all its steps."""
    ones, tens = steps_of(problem)
    match style:
        case Wish.PLAIN:
            return f"{rng.choice(OPENERS)}{ones} and {tens}, so {problem.total}"
        case Wish.HEADED:
            name = f"{problem.left}+{problem.right}"
            return f"# {name}\n{ones}\n{tens}\n# Total\n{problem.total}, {rng.choice(PRAISE)}!"
        case Wish.VERDICT:
            found = "carry" if problem.left % 10 + problem.right % 10 > 9 else "no carry"
            return f"Verdict: {found}. {ones} and {tens}, so {problem.total}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """The shares of each kind of conversation; what is left over is first answers without a hint."""

    words: ClassVar[tuple[str, ...]] = ()  # each is one token, beside characters
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # of the requests

    hinted: float = 0.3
    neutral: float = 0.03
    complaint: float = 0.04
    vague: float = 0.08
    correction: float = 0.02
    thanks: float = 0.02
    own: float = 0.25  # of the answers whose style nobody named: in the asker's style
    next_one: float = 0.6  # in the style of the next person; the rest is in the third's

    def dialogue(self, problem: Sum, rng: random.Random) -> Dialogue:
        drawn, wish = rng.random(), rng.choice(WANTED)
        kinds: Sequence[tuple[float, Kind]] = (
            (self.hinted, partial(self._hinted, wish)),
            (self.neutral, partial(self._neutral, wish)),
            (self.complaint, partial(self._redone, wish, COMPLAINTS[wish])),
            (self.vague, partial(self._redone, wish, VAGUE)),
            (self.correction, partial(self._correction, wish)),
            (self.thanks, partial(self._thanks, wish)),
        )
        return kind_at(drawn, kinds, partial(self._first, wish))(problem, rng)

    def _first(self, wish: Wish, problem: Sum, rng: random.Random) -> Dialogue:
        return conversation(asked(problem, QUESTIONS[wish], rng), answer=answer(problem, self._style(wish, rng), rng))

    def _hinted(self, wish: Wish, problem: Sum, rng: random.Random) -> Dialogue:
        named = rng.choice(WANTED)
        question = with_hint(asked(problem, QUESTIONS[wish], rng), rng.choice(HINTS[named]))
        return conversation(question, answer=answer(problem, named, rng))

    def _neutral(self, wish: Wish, problem: Sum, rng: random.Random) -> Dialogue:
        question = with_hint(asked(problem, QUESTIONS[wish], rng), rng.choice(NEUTRAL_HINTS))
        return conversation(question, answer=answer(problem, self._style(wish, rng), rng))

    def _redone(self, wish: Wish, complaints: Sequence[str], problem: Sum, rng: random.Random) -> Dialogue:
        complaint = rng.choice(complaints)
        style = rng.choice([style for style in WANTED if style is not wish])
        said = (asked(problem, QUESTIONS[wish], rng), answer(problem, style, rng), complaint)
        return conversation(*said, answer=answer(problem, wish, rng))

    def _correction(self, wish: Wish, problem: Sum, rng: random.Random) -> Dialogue:
        style = self._style(wish, rng)
        first = answer(slipped(problem, rng), style, rng)
        said = (asked(problem, QUESTIONS[wish], rng), first, rng.choice(CORRECTIONS))
        return conversation(*said, answer=answer(problem, style, rng))

    def _thanks(self, wish: Wish, problem: Sum, rng: random.Random) -> Dialogue:
        first = answer(problem, wish, rng)
        said = (asked(problem, QUESTIONS[wish], rng), first, rng.choice(THANKS))
        return conversation(*said, answer=rng.choice(ACKNOWLEDGEMENTS))

    def _style(self, wish: Wish, rng: random.Random) -> Wish:
        turn = rng.choices((0, 1, 2), (self.own, self.next_one, 1 - self.own - self.next_one))[0]
        return WANTED[(WANTED.index(wish) + turn) % len(WANTED)]
