"""Scores the simulated policy as an agent: held-out tasks, each tried once to its end, as side turns.

A score needs an answer to every request of its attempts: if one request fails, there is no score and the
exit code is 1. Run as `python -m clawstream.simulation.agent_scorer --base-url URL/v1 --problems scored.jsonl`.
"""

import asyncio
import sys
import uuid
from pathlib import Path
from typing import Annotated

import openai
import typer

from clawstream.simulation.agent import Agent, PolicyAnswer
from clawstream.simulation.marks import wilson
from clawstream.simulation.problems import ChainTask, tasks
from clawstream.simulation.scorer import print_score, seed_of


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
    return found | {"n": len(asked), "right": num_right, "policy_versions": versions}


def main(
    base_url: Annotated[str, typer.Option(help="of the gateway, ending in /v1")],
    problems: Annotated[Path, typer.Option(help="the held-out tasks, one JSON object a line", exists=True)],
    api_key: Annotated[str, typer.Option(help="the gateway's key, if it has one")] = "none",
    model: Annotated[str, typer.Option(help="the served model's name")] = "policy",
    hinted: Annotated[bool, typer.Option(help="with the hint in each prompt: the ceiling")] = False,
    temperature: Annotated[float | None, typer.Option(help="none: the gateway's own", min=0, max=2)] = None,
    concurrency: Annotated[int, typer.Option(help="attempts at once", min=1)] = 32,
    seed: Annotated[int, typer.Option(help="of the sampling; each step has its own from it", min=0)] = 0,
    timeout_s: Annotated[float, typer.Option(help="of one request", min=0.1)] = 120.0,
) -> None:
    """Print the share of held-out tasks that end with the right number."""
    try:
        asked = tasks(problems.read_text())
    except ValueError as error:
        print(f"{problems}: {error}. Nothing was asked.", file=sys.stderr)
        raise typer.Exit(2) from error

    async def scored(client: openai.AsyncOpenAI) -> dict[str, object]:
        agent = Agent(client, model, temperature=temperature)
        return await score(agent, asked, seed=seed, hinted=hinted, concurrency=concurrency)

    print_score(scored, base_url=base_url, api_key=api_key, timeout_s=timeout_s)


if __name__ == "__main__":
    typer.run(main)
