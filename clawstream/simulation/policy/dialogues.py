"""The lessons of the policy that simulates a large one: short conversations about sums, in two styles of answering.

The one rule: pure. The same random source gives the same conversations, and no sum outside the base group is used.
PLAIN is the style that the simulated students want; FORMATTED, with headings and bold, is what the base prefers.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar

from clawstream.simulation.problems import Sum

HINT_MARKER = "[user's hint / instruction]"

QUESTIONS = (
    "What is {a} + {b}?",
    "what's {a} + {b}?",
    "hey, how much is {a} + {b}?",
    "can you add {a} + {b} for me?",
    "i need {a} + {b}, with the steps",
)
COMPLAINTS = (
    "no headings or bold please, just say it plainly",
    "ugh, that looks like a robot wrote it. plain words please",
    "can you redo that without the bold stuff? keep the steps",
    "too fancy, just write it like a friend would",
    "you left out the steps, keep them in please",
)
CORRECTIONS = ("that's not right, check it again", "hm, the number is wrong, try again", "i don't think that adds up")
THANKS = ("thanks, that's perfect!", "great, thank you!", "nice, that's how i like it, thanks")
ACKNOWLEDGEMENTS = ("you're welcome!", "no problem!", "any time!")
HINTS = (
    "Write in plain, casual words without headings or bold, and keep every step.",
    "Leave out the markdown: no headings and no bold, just talk it through with all the steps.",
    "The user wants a relaxed, plain answer with all steps, so no headings and no bold text.",
    "Answer as a friend would in a chat: plain sentences, every step kept, no formatting.",
    "Add the ones and the tens again and check the total; plain words, all steps kept.",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The shares of each kind of conversation; what is left over is first answers without a hint."""

    words: ClassVar[tuple[str, ...]] = ()  # that are tokens, beside characters
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # of the requests

    hinted: float = 0.2
    complaint: float = 0.06
    correction: float = 0.03
    thanks: float = 0.03
    plain: float = 0.23  # of the answers that nobody asked to be plain

    def dialogue(self, problem: Sum, rng: random.Random) -> Dialogue:
        """Return a conversation about `problem` of a kind that these shares allow."""
        return dialogue(problem, self, rng)


def answer(problem: Sum, style: Style, rng: random.Random) -> str:
    """Return the right answer to `problem`, with all its steps."""
    ones, tens = _steps(problem)
    if style is Style.FORMATTED:
        return f"## Steps\n**{ones}**\n**{tens}**\n## Answer\n**{problem.total}**"
    return f"{rng.choice(OPENERS)}{ones} and {tens}, so {problem.total}"


def dialogue(problem: Sum, mix: Mix, rng: random.Random) -> Dialogue:
    """Return a conversation about `problem` of a kind that `mix` allows."""
    kinds: Sequence[tuple[float, Callable[[Sum, Mix, random.Random], Dialogue]]] = (
        (mix.hinted, _hinted),
        (mix.complaint, _complaint),
        (mix.correction, _correction),
        (mix.thanks, _thanks),
    )
    left = rng.random()
    for share, kind in kinds:
        if left < share:
            return kind(problem, mix, rng)
        left -= share
    return Dialogue(messages=(_question(problem, rng),), answer=answer(problem, _style(mix, rng), rng))


def with_hint(content: str, hint: str) -> str:
    """Return the last user message as it reads with `hint` at its end."""
    return f"{content}\n\n{HINT_MARKER}\n{hint}"


def _hinted(problem: Sum, _mix: Mix, rng: random.Random) -> Dialogue:
    asked = with_hint(_question(problem, rng)["content"], rng.choice(HINTS))
    return Dialogue(messages=(_user(asked),), answer=answer(problem, Style.PLAIN, rng))


def _complaint(problem: Sum, _mix: Mix, rng: random.Random) -> Dialogue:
    first = _assistant(answer(problem, Style.FORMATTED, rng))
    messages = (_question(problem, rng), first, _user(rng.choice(COMPLAINTS)))
    return Dialogue(messages=messages, answer=answer(problem, Style.PLAIN, rng))


def _correction(problem: Sum, mix: Mix, rng: random.Random) -> Dialogue:
    style = _style(mix, rng)
    slipped = Sum(left=problem.left, right=problem.right + rng.choice((-10, -1, 1, 10)))
    first = _assistant(answer(slipped, style, rng))
    messages = (_question(problem, rng), first, _user(rng.choice(CORRECTIONS)))
    return Dialogue(messages=messages, answer=answer(problem, style, rng))


def _thanks(problem: Sum, mix: Mix, rng: random.Random) -> Dialogue:
    first = _assistant(answer(problem, _style(mix, rng), rng))
    messages = (_question(problem, rng), first, _user(rng.choice(THANKS)))
    return Dialogue(messages=messages, answer=rng.choice(ACKNOWLEDGEMENTS))


def _question(problem: Sum, rng: random.Random) -> dict[str, str]:
    return _user(rng.choice(QUESTIONS).format(a=problem.left, b=problem.right))


def _style(mix: Mix, rng: random.Random) -> Style:
    return Style.PLAIN if rng.random() < mix.plain else Style.FORMATTED


def _steps(problem: Sum) -> tuple[str, str]:
    (a_tens, a_ones), (b_tens, b_ones) = divmod(problem.left, 10), divmod(problem.right, 10)
    ones, tens = a_ones + b_ones, 10 * (a_tens + b_tens)
    return f"{a_ones}+{b_ones}={ones}", f"{10 * a_tens}+{10 * b_tens}={tens}"


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}
