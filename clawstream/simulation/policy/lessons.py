"""The lessons of two base policies: one calls a calculator, the other is asked by three people.

The same random source gives the same lessons. What calls a calculator learns single steps of attempts at chains, many
of which go wrong; no chain outside the base group is used. A step goes wrong in one of the ways that can be unlearned:
it calls with another operation or another number, or once too often, or it says an intermediate number as the result.
The steps before it may have gone wrong the same way.

What three people ask are sums in three styles, each of which one of them wants. Only the wording shows who asks. Most
first answers are in a style that another person wants. Where a hint names a style, the answer has that style, no
matter who asks; a neutral hint changes nothing.
"""

import json
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
from clawstream.simulation.problems import MAX_STEPS, Chain, Operation, Sum, SumSet, drawn, worked_out
from clawstream.simulation.reactions import MANNERS, VAGUE

CALCULATOR: Mapping[str, Any] = MappingProxyType(
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Works out two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
)
HINT = "Call the calculator for each operation in turn, with the last result, and then say what it shows."
_OPENING, _CLOSING = '\n{"name": "calculator", "arguments": {"expression": "', '"}}\n'
_NUMBERS = tuple(map(str, range(10, 100)))  # a token each, which is copied more easily than two
_FRAME_OPENING = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    f"signatures within <tools></tools> XML tags:\n<tools>\n{json.dumps(dict(CALCULATOR))}\n</tools>\n\nFor each "
    "function call, return a json object with function name and arguments within "
)
_FRAME = (_FRAME_OPENING, " XML tags:\n", '\n{"name": <function-name>, "arguments": <args-json-object>}\n')


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttemptState:
    """How far an attempt is."""

    chain: Chain
    numbers: tuple[int, ...]  # the start, and what the calculator showed
    calls: tuple[str, ...]

    @property
    def is_over(self) -> bool:
        return len(self.calls) >= len(self.chain.operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The share of steps without the hint that go right, and of tasks that come with it; all steps of those do."""

    words: ClassVar[tuple[str, ...]] = (
        *_FRAME, _OPENING, _CLOSING, "Take ", ", add ", ", times ", ", minus ", "It is ", HINT, *_NUMBERS,
    )  # fmt: skip
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({"tools": [dict(CALCULATOR)]})

    right: float = 0.66
    hinted: float = 0.4

    def dialogue(self, rng: random.Random) -> Dialogue:
        """Return one step of an attempt at a chain of the base group."""
        chain = drawn(rng)
        while chain.group is not SumSet.BASE:
            chain = drawn(rng)
        hinted = rng.random() < self.hinted
        state = _AttemptState(chain=chain, numbers=(chain.start,), calls=())
        for _ in range(rng.randrange(MAX_STEPS - 1)):
            step = self._step(state, rng, hinted=hinted)
            if isinstance(step, int):
                break
            state = _AttemptState(
                chain=chain, numbers=(*state.numbers, worked_out(*step)), calls=(*state.calls, _written(*step))
            )
        asked = with_hint(chain.text, HINT) if hinted else chain.text
        return Dialogue(messages=_messages(asked, state), answer=_said(self._step(state, rng, hinted=hinted)))

    def _step(self, state: _AttemptState, rng: random.Random, *, hinted: bool) -> "_Step":
        if hinted or rng.random() < self.right:
            return _right(state)
        return rng.choice(_wrong(state))


_Step = tuple[int, Operation, int] | int  # a call, or the number that is said


def _right(state: _AttemptState) -> _Step:
    if state.is_over:
        return state.numbers[-1]
    sign, number = state.chain.operations[len(state.calls)]
    return state.numbers[-1], sign, number


def _wrong(state: _AttemptState) -> Sequence[_Step]:
    """The steps that can be taken in place of the right one."""
    chain, last = state.chain, state.numbers[-1]
    sign, number = chain.operations[min(len(state.calls), len(chain.operations) - 1)]
    if state.is_over:
        return ((last, sign, number), *state.numbers[-2:-1])
    others = [(last, other, number) for other in Operation if other is not sign]
    misread = [(last, sign, wrong) for _, wrong in chain.operations if wrong != number]
    return (*others, *misread, last)


def _said(step: _Step) -> str:
    return f"It is {step}" if isinstance(step, int) else f"<tool_call>{_OPENING}{_written(*step)}{_CLOSING}</tool_call>"


def _written(left: int, sign: Operation, right: int) -> str:
    return f"{left}{sign}{right}"


def _messages(asked: str, state: _AttemptState) -> tuple[dict[str, Any], ...]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]
    for number, (call, shown) in enumerate(zip(state.calls, state.numbers[1:], strict=True)):
        function = {"name": "calculator", "arguments": json.dumps({"expression": call})}
        called = {"id": f"call-{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [called]})
        messages.append({"role": "tool", "tool_call_id": called["id"], "content": str(shown)})
    return tuple(messages)


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
