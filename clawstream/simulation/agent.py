"""Simulates agents that try tasks with a calculator, several times each, and are told whether they were right.

The attempts at one task are a group, and each attempt is a session. The environment's outcome is sent about the
attempt's last answer, then the end of the session. A failed request ends an attempt, which then has no outcome. Run as
`python -m clawstream.simulation.agent --base-url URL/v1 --problems tasks.jsonl`; commands and reports are those of
student.py.
"""

import asyncio
import itertools
import random
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import openai
import typer

from clawstream.simulation.attempts import Agent, PolicyAnswer
from clawstream.simulation.problems import ChainTask, tasks
from clawstream.simulation.student import RequestReport, StudentPool, run, say


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
    concurrency: Annotated[int, typer.Option(help="attempts at once", min=1)] = 4,
    seed: Annotated[int, typer.Option(help="of the tasks' order")] = 0,
    wait: Annotated[bool, typer.Option("--wait", help="start no attempt before stdin says go")] = False,
    timeout_s: Annotated[float, typer.Option(help="of one request", min=0.1)] = 120.0,
) -> None:
    """Try tasks as an agent's program would, until stdin says stop or ends; stop cleanly on SIGTERM."""
    try:
        asked = tasks(problems.read_text())
    except ValueError as error:
        print(f"{problems}: {error}. Nothing was asked.", file=sys.stderr)
        raise typer.Exit(2) from error
    random.Random(seed).shuffle(asked)
    plan = attempts(asked, run_name=f"task-{seed}-{uuid.uuid4().hex[:8]}", size=attempts_each)

    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=timeout_s) as client:
            classroom = StudentPool(AgentClient(client, model), plan, seed=seed, num_sessions=None, waits=wait)
            await run(classroom, concurrency, until_closed=True)

    asyncio.run(work())


if __name__ == "__main__":
    typer.run(main)
