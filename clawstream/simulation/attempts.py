"""One attempt at a chain with a calculator: the policy is asked and its calls are made, until it says a number.

Only the environment says whether the number is right, and only once the attempt is over.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from clawstream.simulation.policy.calls import CALCULATOR
from clawstream.simulation.policy.dialogues import with_hint
from clawstream.simulation.problems import MAX_STEPS, ChainTask, UnusableExpression, calculate

MAX_TOKENS = 48  # of an answer; a call takes 20 at most
_NUMBER = re.compile(r"-?[0-9]+")
_VERSION_HEADER = "x-policy-version"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAnswer:
    """One answer of the policy, as its client saw it."""

    step: int
    started_at_s: float
    total_ms: float
    num_tokens: int
    version: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    right: bool
    response_id: str  # of its last answer


OnAnswer = Callable[[PolicyAnswer], None]


class Agent:
    """Works at one task after the other with one client."""

    def __init__(self, client: openai.AsyncOpenAI, model: str, *, temperature: float | None = None) -> None:
        self._client, self._model = client, model
        self._temperature = openai.omit if temperature is None else temperature

    async def attempt(
        self, task: ChainTask, headers: Mapping[str, str], on_answer: OnAnswer, *, hinted: bool = False,
        seed: Callable[[int], int] | None = None,
    ) -> Ended:  # fmt: skip
        """Try the task and return the end; `seed` gives the sampling's seed by step. Raises openai.OpenAIError."""
        asked = with_hint(task.question, task.hint) if hinted else task.question
        messages: list[Any] = [{"role": "user", "content": asked}]
        for step in range(MAX_STEPS):
            grouped = {"X-Step-Index": str(step)} if "X-Group-Id" in headers else {}
            reply = await self._ask(messages, {**headers, **grouped}, on_answer, step, seed)
            said = reply.choices[0].message
            if not said.tool_calls:
                break
            messages += [said.model_dump(exclude_none=True), *results(said)]
        return Ended(right=is_right(task, said), response_id=reply.id)

    async def _ask(
        self, messages: list[Any], headers: Mapping[str, str], on_answer: OnAnswer, step: int,
        seed: Callable[[int], int] | None,
    ) -> ChatCompletion:  # fmt: skip
        started_at_s, started = time.time(), time.perf_counter()
        raw = await self._client.chat.completions.with_raw_response.create(
            model=self._model,
            messages=messages,
            tools=[dict(CALCULATOR)],  # type: ignore[list-item]
            max_tokens=MAX_TOKENS,
            extra_headers=headers,
            seed=openai.omit if seed is None else seed(step),
            temperature=self._temperature,
        )
        reply = raw.parse()
        on_answer(
            PolicyAnswer(
                step=step,
                started_at_s=started_at_s,
                total_ms=(time.perf_counter() - started) * 1000,
                num_tokens=reply.usage.completion_tokens if reply.usage else 0,
                version=raw.headers.get(_VERSION_HEADER),
            )
        )
        return reply


def results(said: ChatCompletionMessage) -> list[dict[str, str]]:
    """Return the result, or the error, of each call of the answer, as messages."""
    return [
        {"role": "tool", "tool_call_id": call.id, "content": _result(call.function.name, call.function.arguments)}
        for call in said.tool_calls or ()
        if call.type == "function"
    ]


def is_right(task: ChainTask, said: ChatCompletionMessage) -> bool:
    """Whether the answer ends the attempt rightly: it calls nothing, and its last number is the task's result."""
    return not said.tool_calls and _NUMBER.findall(said.content or "")[-1:] == [task.answer]


def _result(name: str, arguments: str) -> str:
    if name != CALCULATOR["function"]["name"]:
        return f"error: there is no tool {name}, only a calculator"
    try:
        return calculate(str(json.loads(arguments)["expression"]))
    except UnusableExpression as error:
        return str(error)
    except (KeyError, TypeError, ValueError):  # the policy may write anything
        return "error: the expression is missing"
