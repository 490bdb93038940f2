"""The lessons of a base policy that calls a calculator: single steps of attempts at chains, many of which go wrong.

The same random source gives the same steps, and no chain outside the base group is used. A step goes wrong in
one of the ways that can be unlearned: it calls with another operation or another number, or it says an intermediate
number as the result. The steps before it may have gone wrong the same way.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from clawstream.simulation.policy.dialogues import Dialogue, with_hint
from clawstream.simulation.problems import MAX_STEPS, Chain, Operation, SumSet, drawn, worked_out

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
    """The share of steps that go right, and of tasks that come with the hint; all steps of those go right."""

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
