"""Simulates agents that try tasks with a calculator, several times each, and are told whether they were right.

In an attempt the policy is asked and its calls are made, until it answers without a call. Only the environment says
whether the number is right, and only once the attempt is over. The attempts at one task are a group, and each attempt
is a session. After an attempt its outcome is sent, as feedback on its last answer, then the session's end. A failed
request ends an attempt, which then has no outcome. Run as `python -m clawstream.simulation.agent --base-url URL/v1
--problems tasks.jsonl`; it prints the reports of student.py, and takes its commands except talk and flip. With --score
it tries held-out tasks once each, as side turns, and prints a score as scorer.py does.
"""

import asyncio
import itertools
import json
import random
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import openai
import typer
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from clawstream.simulation.marks import wilson
from clawstream.simulation.policy.dialogues import with_hint
from clawstream.simulation.policy.lessons import CALCULATOR
from clawstream.simulation.problems import MAX_STEPS, ChainTask, UnusableExpression, calculate, tasks
from clawstream.simulation.scorer import print_score, seed_of
from clawstream.simulation.student import RequestReport, StudentPool, run, say

MAX_TOKENS = 48  # of an answer; a call takes 20 at most
TRIED_AT_ONCE, SCORED_AT_ONCE = 4, 32  # attempts
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
    response_id: str  # of the attempt's last answer


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
        """Try the task and return how it ended; `seed` gives the sampling's seed by step. Raises openai.OpenAIError."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a task."""

    task: ChainTask
    group: str
    size: int  # the number of attempts in the group


class AgentClient:
    """Makes attempts through the gateway, and sends the environment's outcomes of them."""

    def __init__(self, client: openai.AsyncOpenAI, model: str) -> None:
        self._client, self._agent = client, Agent(client, model)

    async def chat(self, session: str, attempt: Attempt, rng: random.Random) -> bool:
        """Make the attempt as a session; False where a request of it failed."""
        del rng
        group = {"X-Group-Id": attempt.group, "X-Group-Size": str(attempt.size)}
        headers = {"X-Session-Id": session, "X-Turn-Type": "main", **group}
        asked_at_s = time.time()  # the request that is under way

        def on_answer(answered: PolicyAnswer) -> None:
            nonlocal asked_at_s
            _report(
                session, first_answer=answered.step == 0, started_at_s=answered.started_at_s,
                total_ms=answered.total_ms, num_tokens=answered.num_tokens,
            )  # fmt: skip
            asked_at_s = time.time()

        try:
            ended = await self._agent.attempt(attempt.task, headers, on_answer)
            score = 1.0 if ended.right else -1.0
            outcome = {"response_id": ended.response_id, "source": "environment", "score": score}
            await self._client.post("/feedback", body=outcome, cast_to=object)
            end = {"session_done": True}
            await self._client.post("/chat/completions", body=end, cast_to=object, options={"headers": headers})
        except openai.OpenAIError as problem:
            total_ms = (time.time() - asked_at_s) * 1000
            error = f"{type(problem).__name__}: {problem}"
            _report(session, started_at_s=asked_at_s, total_ms=total_ms, error=error)
            return False
        return True


def attempts(asked: Sequence[ChainTask], *, run_name: str, size: int) -> Iterator[Attempt]:
    """Yield `size` attempts at one task after the other, without end; each time they are a new group."""
    for number in itertools.count():
        group = f"{run_name}-{number:05d}"
        yield from itertools.repeat(Attempt(task=asked[number % len(asked)], group=group, size=size), size)


async def score(
    agent: Agent, asked: list[ChainTask], *, seed: int, hinted: bool, concurrency: int
) -> dict[str, object]:
    """Return the share of right attempts, its 95 % interval, and which versions answered."""
    slots, name, answers = asyncio.Semaphore(concurrency), uuid.uuid4().hex[:8], list[PolicyAnswer]()

    async def tried(number: int, task: ChainTask) -> bool:
        headers = {"X-Turn-Type": "side", "X-Session-Id": f"scorer-{name}-{number:03d}"}
        async with slots:
            ended = await agent.attempt(
                task, headers, answers.append, hinted=hinted, seed=lambda step: seed_of(seed, task.question, step)
            )
        return ended.right

    async with asyncio.TaskGroup() as group:
        attempts = [group.create_task(tried(number, task)) for number, task in enumerate(asked)]
    num_right = sum(attempt.result() for attempt in attempts)
    low, high = wilson(num_right, len(asked))
    versions = sorted({answer.version for answer in answers if answer.version is not None})
    found: dict[str, object] = {"score": num_right / len(asked), "ci95_low": low, "ci95_high": high}
    return found | {"n": len(asked), "right": num_right, "ungraded": 0, "policy_versions": versions}


def _report(
    session: str, *, started_at_s: float, total_ms: float, first_answer: bool = False, num_tokens: int = 0,
    error: str | None = None,
) -> None:  # fmt: skip
    """Print the line of one request; its answer comes whole, so no chunks are timed."""
    report = RequestReport(
        session=session, first_answer=first_answer, failed=error is not None, error=error, ttft_ms=None, gaps=(),
        started_at_s=started_at_s, total_ms=total_ms, num_chunks=num_tokens,
    )  # fmt: skip
    say(asdict(report))


def main(
    base_url: Annotated[str, typer.Option(help="of the gateway, ending in /v1")],
    problems: Annotated[Path, typer.Option(help="the tasks, one JSON object a line", exists=True)],
    api_key: Annotated[str, typer.Option(help="the gateway's key, if it has one")] = "none",
    model: Annotated[str, typer.Option(help="the served model's name")] = "policy",
    attempts_each: Annotated[int, typer.Option("--attempts", help="at each task: a group", min=1)] = 4,
    score_only: Annotated[bool, typer.Option("--score", help="try each task once, and print the share")] = False,
    hinted: Annotated[bool, typer.Option(help="of a score: with the hint in each prompt: the ceiling")] = False,
    temperature: Annotated[float | None, typer.Option(help="of a score; none: the gateway's", min=0, max=2)] = None,
    concurrency: Annotated[int | None, typer.Option(help="attempts at once: 4, for a score 32", min=1)] = None,
    seed: Annotated[int, typer.Option(help="of the tasks' order; of a score, of the sampling")] = 0,
    wait: Annotated[bool, typer.Option("--wait", help="start no attempt before stdin says go")] = False,
    timeout_s: Annotated[float, typer.Option(help="of one request", min=0.1)] = 120.0,
) -> None:
    """Try tasks as an agent's program would, until stdin says stop or ends; stop cleanly on SIGTERM."""
    try:
        asked = tasks(problems.read_text())
    except ValueError as error:
        print(f"{problems}: {error}. Nothing was asked.", file=sys.stderr)
        raise typer.Exit(2) from error
    if score_only:
        print_score(
            lambda client: score(
                Agent(client, model, temperature=temperature), asked, seed=seed, hinted=hinted,
                concurrency=concurrency or SCORED_AT_ONCE,
            ),
            base_url=base_url, api_key=api_key, timeout_s=timeout_s,
        )  # fmt: skip
        return
    random.Random(seed).shuffle(asked)
    plan = attempts(asked, run_name=f"task-{seed}-{uuid.uuid4().hex[:8]}", size=attempts_each)

    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=timeout_s) as client:
            classroom = StudentPool(AgentClient(client, model), plan, seed=seed, num_sessions=None, waits=wait)
            await run(classroom, concurrency or TRIED_AT_ONCE, until_closed=True)

    asyncio.run(work())


if __name__ == "__main__":
    typer.run(main)
