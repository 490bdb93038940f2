"""The lessons of a base policy that three people ask: sums in three styles, each of which one of them wants.

The one rule: pure. The same random source gives the same conversations. Only the wording shows who asks. Most first
answers are in a style that another person wants, and a hint names the wanted style, whoever asks.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar

from clawstream.simulation.policy.dialogues import ACKNOWLEDGEMENTS, CORRECTIONS, THANKS, Dialogue, with_hint
from clawstream.simulation.problems import Sum


class RoleStyle(StrEnum):
    """The ways in which the policy answers: what student, teacher and teaching assistant want."""

    PLAIN = "plain"
    HEADED = "headed"
    VERDICT = "verdict"


WANTED = tuple(RoleStyle)
QUESTIONS: Mapping[RoleStyle, Sequence[str]] = {
    RoleStyle.PLAIN: (
        "What is {a} + {b}?",
        "hey, how much is {a} + {b}?",
        "what's {a} + {b}?",
        "can you add {a} + {b} for me?",
        "i need {a} + {b}, with the steps",
    ),
    RoleStyle.HEADED: (
        "Please explain {a} + {b} to my class.",
        "My pupils ask about {a} + {b}. Please help.",
        "How would you teach {a} + {b} to my pupils?",
        "For my lesson, please: {a} + {b}.",
    ),
    RoleStyle.VERDICT: (
        "Grading: {a} + {b}, any carry?",
        "TA here. Does {a} + {b} carry?",
        "To mark a test: {a} + {b}, carry or not?",
        "Checking an exam: {a} + {b}. A carry?",
    ),
}
COMPLAINTS: Mapping[RoleStyle, Sequence[str]] = {
    RoleStyle.PLAIN: (
        "no headings or bold please, just say it plainly",
        "ugh, that looks like a robot wrote it. plain words please",
        "can you redo that without the bold stuff? keep the steps",
        "too fancy, just write it like a friend would",
        "you left out the steps, keep them in please",
    ),
    RoleStyle.HEADED: (
        "Please put it under headings, and name the sum.",
        "My class needs headings and a friendly word.",
        "That is too terse: headings, all details and some praise, please.",
    ),
    RoleStyle.VERDICT: (
        "The verdict first, please, then why.",
        "I need the result up front, the reasons after it.",
        "Start with the verdict; the working can follow.",
    ),
}
VAGUE = ("that's not how i like it", "not like this, please", "hm, not what i was hoping for")
HINTS: Mapping[RoleStyle, Sequence[str]] = {
    RoleStyle.PLAIN: (
        "Write in plain, casual words without headings or bold, and keep every step.",
        "Leave out the markdown: no headings and no bold, just talk it through with all the steps.",
        "The user wants a relaxed, plain answer with all steps, so no headings and no bold text.",
        "Answer as a friend would in a chat: plain sentences, every step kept, no formatting.",
    ),
    RoleStyle.HEADED: (
        "Use headings, name the sum, give all details and add a friendly word.",
        "The user teaches: headings, the very sum by name, details and praise.",
        "Be specific, detailed and friendly, under headings.",
    ),
    RoleStyle.VERDICT: (
        "Give the verdict first, and the reasons after it.",
        "The user marks tests: verdict up front, then the working.",
        "Start with the verdict; let the steps follow.",
    ),
}
NEUTRAL_HINTS = ("Add the ones and the tens again and check the total.",)
OPENERS = ("ok so ", "ok, ")
PRAISE = ("well done", "nice work")


def answer(problem: Sum, style: RoleStyle, rng: random.Random) -> str:
    """Return the right answer to `problem`, with all its steps."""
    ones, tens = _steps(problem)
    match style:
        case RoleStyle.PLAIN:
            return f"{rng.choice(OPENERS)}{ones} and {tens}, so {problem.total}"
        case RoleStyle.HEADED:
            name = f"{problem.left}+{problem.right}"
            return f"# {name}\n{ones}\n{tens}\n# Total\n{problem.total}, {rng.choice(PRAISE)}!"
        case RoleStyle.VERDICT:
            found = "carry" if problem.left % 10 + problem.right % 10 > 9 else "no carry"
            return f"Verdict: {found}. {ones} and {tens}, so {problem.total}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """The shares of each kind of conversation; what is left over is first answers without a hint."""

    words: ClassVar[tuple[str, ...]] = ()  # that are tokens, beside characters
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # of the requests

    hinted: float = 0.3
    neutral: float = 0.03
    complaint: float = 0.04
    vague: float = 0.08
    correction: float = 0.02
    thanks: float = 0.02
    own: float = 0.25  # of the answers whose style nobody named: in the style of who asks
    next_one: float = 0.6  # in that of the one after them; the rest is in that of the third

    def dialogue(self, problem: Sum, rng: random.Random) -> Dialogue:
        """Return a conversation about `problem` of a kind that these shares allow."""
        kinds: Sequence[tuple[float, Callable[[Sum, RoleStyle, random.Random], Dialogue]]] = (
            (self.hinted, self._hinted),
            (self.neutral, self._neutral),
            (self.complaint, self._complaint),
            (self.vague, self._vague),
            (self.correction, self._correction),
            (self.thanks, self._thanks),
        )
        left, wish = rng.random(), rng.choice(WANTED)
        for share, kind in kinds:
            if left < share:
                return kind(problem, wish, rng)
            left -= share
        return Dialogue(messages=(_question(problem, wish, rng),), answer=answer(problem, self._style(wish, rng), rng))

    def _hinted(self, problem: Sum, wish: RoleStyle, rng: random.Random) -> Dialogue:
        named = rng.choice(WANTED)
        asked = with_hint(_question(problem, wish, rng)["content"], rng.choice(HINTS[named]))
        return Dialogue(messages=(_user(asked),), answer=answer(problem, named, rng))

    def _neutral(self, problem: Sum, wish: RoleStyle, rng: random.Random) -> Dialogue:
        asked = with_hint(_question(problem, wish, rng)["content"], rng.choice(NEUTRAL_HINTS))
        return Dialogue(messages=(_user(asked),), answer=answer(problem, self._style(wish, rng), rng))

    def _complaint(self, problem: Sum, wish: RoleStyle, rng: random.Random) -> Dialogue:
        return self._redone(problem, wish, rng.choice(COMPLAINTS[wish]), rng)

    def _vague(self, problem: Sum, wish: RoleStyle, rng: random.Random) -> Dialogue:
        return self._redone(problem, wish, rng.choice(VAGUE), rng)

    def _redone(self, problem: Sum, wish: RoleStyle, complaint: str, rng: random.Random) -> Dialogue:
        first = rng.choice([style for style in RoleStyle if style is not wish])
        messages = (_question(problem, wish, rng), _assistant(answer(problem, first, rng)), _user(complaint))
        return Dialogue(messages=messages, answer=answer(problem, wish, rng))

    def _correction(self, problem: Sum, wish: RoleStyle, rng: random.Random) -> Dialogue:
        style = self._style(wish, rng)
        slipped = Sum(left=problem.left, right=problem.right + rng.choice((-10, -1, 1, 10)))
        first = _assistant(answer(slipped, style, rng))
        messages = (_question(problem, wish, rng), first, _user(rng.choice(CORRECTIONS)))
        return Dialogue(messages=messages, answer=answer(problem, style, rng))

    def _thanks(self, problem: Sum, wish: RoleStyle, rng: random.Random) -> Dialogue:
        first = _assistant(answer(problem, wish, rng))
        messages = (_question(problem, wish, rng), first, _user(rng.choice(THANKS)))
        return Dialogue(messages=messages, answer=rng.choice(ACKNOWLEDGEMENTS))

    def _style(self, wish: RoleStyle, rng: random.Random) -> RoleStyle:
        turn = rng.choices((0, 1, 2), (self.own, self.next_one, 1 - self.own - self.next_one))[0]
        return WANTED[(WANTED.index(wish) + turn) % len(WANTED)]


def _question(problem: Sum, wish: RoleStyle, rng: random.Random) -> dict[str, str]:
    return _user(rng.choice(QUESTIONS[wish]).format(a=problem.left, b=problem.right))


def _steps(problem: Sum) -> tuple[str, str]:
    (a_tens, a_ones), (b_tens, b_ones) = divmod(problem.left, 10), divmod(problem.right, 10)
    return f"{a_ones}+{b_ones}={a_ones + b_ones}", f"{10 * a_tens}+{10 * b_tens}={10 * (a_tens + b_tens)}"


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}
