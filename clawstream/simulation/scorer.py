"""Scores the simulated policy through the gateway: held-out problems, asked as side turns, marked by code of its own.

A score needs every answer: if one request fails, there is no score and the exit code is 1. Run as `python
-m clawstream.simulation.scorer --base-url URL/v1 --problems scored.jsonl`; prints one JSON object.
"""

import asyncio
import hashlib
import sys
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import openai
import orjson
import typer

from clawstream.simulation.marks import AnswerMark, HeldOutQuestion, by_persona, mark, questions, total

_HINT_MARKER = "[user's hint / instruction]"
_VERSION_HEADER = "x-policy-version"


class Scorer:
    """Asks the held-out problems, `concurrency` at most at a time, and marks the answers."""

    def __init__(
        self, client: openai.AsyncOpenAI, *, model: str, hinted: bool, temperature: float | None, concurrency: int,
        max_tokens: int, api_keys: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """`api_keys` has the keys, by name, of people who have one of their own."""
        self._api_keys = api_keys
        self._client, self._model, self._hinted, self._max_tokens = client, model, hinted, max_tokens
        self._temperature = openai.omit if temperature is None else temperature
        self._slots = asyncio.Semaphore(concurrency)
        self._run = uuid.uuid4().hex[:8]
        self.versions: set[str] = set()

    async def mark_all(self, asked: list[HeldOutQuestion], seed: int) -> list[AnswerMark]:
        """Return the mark of each answer, in the order of `asked`."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._marked(number, q, seed)) for number, q in enumerate(asked)]
        return [task.result() for task in tasks]

    async def _marked(self, number: int, question: HeldOutQuestion, seed: int) -> AnswerMark:
        shown = self._api_keys.get(question.persona)
        own_key = {} if shown is None else {"Authorization": f"Bearer {shown}"}
        content = f"{question.prompt}\n\n{_HINT_MARKER}\n{question.hint}" if self._hinted else question.prompt
        async with self._slots:
            reply = await self._client.chat.completions.with_raw_response.create(
                model=self._model,
                messages=[{"role": "user", "content": content}],
                seed=seed_of(seed, question.question),
                max_tokens=self._max_tokens,
                extra_headers={
                    "X-Turn-Type": "side",
                    "X-Session-Id": f"scorer-{self._run}-{number:03d}",
                    **own_key,
                },
                temperature=self._temperature,
            )
        version = reply.headers.get(_VERSION_HEADER)
        if version is not None:
            self.versions.add(version)
        return mark(question, reply.parse().choices[0].message.content or "")


def seed_of(*material: object) -> int:
    """Return a number below 2^31 that follows from the material alone."""
    text = "\x1f".join(map(str, material))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:4]) >> 1


def main(
    base_url: Annotated[str, typer.Option(help="of the gateway, ending in /v1")],
    problems: Annotated[
        Path, typer.Option(help="the held-out problems, and who asks, one JSON object a line", exists=True)
    ],
    api_key: Annotated[str, typer.Option(help="the gateway's key, if it has one")] = "none",
    api_keys: Annotated[Path | None, typer.Option(help="keys of people's own, a JSON object by person")] = None,
    model: Annotated[str, typer.Option(help="the served model's name")] = "policy",
    hinted: Annotated[bool, typer.Option(help="with the right hint in each prompt: the ceiling")] = False,
    temperature: Annotated[float | None, typer.Option(help="none: the gateway's own", min=0, max=2)] = None,
    concurrency: Annotated[int, typer.Option(help="requests at once", min=1)] = 32,
    max_tokens: Annotated[int, typer.Option(help="of an answer", min=1)] = 160,
    seed: Annotated[int, typer.Option(help="of the sampling; each problem has its own from it", min=0)] = 0,
    timeout_s: Annotated[float, typer.Option(help="of one request", min=0.1)] = 120.0,
) -> None:
    """Print the share of right and well-styled first answers to the held-out problems."""
    try:
        asked = questions(problems.read_text())
    except ValueError as error:
        print(f"{problems}: {error}. Nothing was asked.", file=sys.stderr)
        raise typer.Exit(2) from error

    async def scored(client: openai.AsyncOpenAI) -> dict[str, object]:
        scorer = Scorer(
            client, model=model, hinted=hinted, temperature=temperature, concurrency=concurrency, max_tokens=max_tokens,
            api_keys={} if api_keys is None else orjson.loads(api_keys.read_bytes()),
        )  # fmt: skip
        marks = await scorer.mark_all(asked, seed)
        found = {"by_persona": by_persona(asked, marks), "policy_versions": sorted(scorer.versions)}
        return asdict(total(marks)) | found

    print_score(scored, base_url=base_url, api_key=api_key, timeout_s=timeout_s)


def print_score(
    scored: Callable[[openai.AsyncOpenAI], Awaitable[dict[str, object]]],
    *,
    base_url: str,
    api_key: str,
    timeout_s: float,
) -> None:
    """Print what a client of the gateway scored; exit with 1, and say why, where a request failed."""

    async def printed() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=timeout_s) as client:
            print(orjson.dumps(await scored(client)).decode(), flush=True)

    is_scored = False
    try:
        asyncio.run(printed())
        is_scored = True
    except* openai.OpenAIError as failed:
        first = failed.exceptions[0]
        print(f"{base_url}: {type(first).__name__}: {first}. There is no score; see the gateway.", file=sys.stderr)
    if not is_scored:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
