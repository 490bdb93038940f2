"""Scores the simulated policy through the gateway: held-out problems, asked as side turns, marked by code of its own.

With --everyday a problem is an everyday request, and facts and sums are asked too, greedily. An engine that serves the
untrained model then says how likely an answer is: what is no language is no answer. With --graded-by a language model
grades the answers in place of code. A score needs every answer: if one request fails, there is no score and the exit
code is 1. Run as `python -m clawstream.simulation.scorer
--base-url URL/v1 --problems scored.jsonl`; prints one JSON object.
"""

import asyncio
import hashlib
import sys
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Annotated, Any, Final

import aiohttp
import openai
import orjson
import typer

from clawstream.config import PolicySettings
from clawstream.errors import TryLater, first_of
from clawstream.inference.engine import EngineRefused
from clawstream.inference.http_engine import HttpEngine
from clawstream.inference.sglang import SglangEngine
from clawstream.simulation.everyday import GeneralQuestion, general
from clawstream.simulation.marks import (
    AnswerMark,
    HeldOutQuestion,
    ScoredQuestion,
    by_persona,
    everyday_questions,
    knows,
    questions,
    total,
)
from clawstream.simulation.roles import RolePlayer, RoleUnplayed, grade_prompt

_VERSION_HEADER = "x-policy-version"
_SHORT_TOKENS: Final = 24  # of the answer to a question about a fact or a sum, of which the first line counts


class Plausibility:
    """How likely the untrained model finds answers, at an engine that serves it."""

    def __init__(self, engine: HttpEngine, base: Path) -> None:
        from clawstream.rendering.renderer import PromptRenderer  # which takes seconds to import, for transformers

        self._engine, self._renderer = engine, PromptRenderer.of(PolicySettings(), base)

    async def mean_nats(self, question: ScoredQuestion, answer: str) -> float | None:
        """Return the mean log-prob of the answer's tokens after the request with the hint; None: it has no tokens."""
        prompt, said = self._renderer.prompt_ids(question.messages(hinted=True), {}), self._renderer.encode(answer)
        return fmean(await self._engine.score([*prompt, *said], len(prompt))) if said else None


class Scorer:
    """Asks the held-out problems, `concurrency` at most at a time, and marks the answers."""

    def __init__(
        self, client: openai.AsyncOpenAI, *, model: str, hinted: bool, temperature: float | None, concurrency: int,
        max_tokens: int | None, api_keys: Mapping[str, str] = MappingProxyType({}),
        plausibility: Plausibility | None = None, grader: RolePlayer | None = None,
    ) -> None:  # fmt: skip
        """`api_keys` has the keys, by name, of people who have one of their own; no `max_tokens`: the policy's own."""
        self._api_keys, self._plausibility, self._grader = api_keys, plausibility, grader
        self._client, self._model, self._hinted, self._max_tokens = client, model, hinted, max_tokens
        self._temperature = temperature
        self._slots = asyncio.Semaphore(concurrency)
        self._run = uuid.uuid4().hex[:8]
        self.versions: set[str] = set()
        self.prompt_tokens: list[int] = []  # of each scored request

    async def mark_all(self, asked: Sequence[ScoredQuestion], seed: int) -> list[AnswerMark | None]:
        """Return the mark of each answer, in the order of `asked`; None: the language model gave no grade."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._marked(number, q, seed)) for number, q in enumerate(asked)]
        return [task.result() for task in tasks]

    async def share_known(self, asked: Sequence[GeneralQuestion], kind: str) -> float:
        """Return the share of questions that the policy answers rightly where it says what it finds likeliest."""

        async def is_known(number: int, question: GeneralQuestion) -> bool:
            said = [{"role": "user", "content": question.question}]
            name = f"{kind}-{number:02d}"
            reply = await self._ask(said, name, temperature=0.0, max_tokens=_SHORT_TOKENS, stop="\n")
            return knows(reply.choices[0].message.content or "", question)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(is_known(number, question)) for number, question in enumerate(asked)]
        return sum(task.result() for task in tasks) / len(tasks)

    async def _marked(self, number: int, question: ScoredQuestion, seed: int) -> AnswerMark | None:
        reply = await self._ask(
            question.messages(hinted=self._hinted), f"{number:03d}", temperature=self._temperature,
            max_tokens=self._max_tokens, seed=seed_of(seed, question.question), persona=question.persona,
        )  # fmt: skip
        choice = reply.choices[0]
        self.prompt_tokens.append(reply.usage.prompt_tokens)
        finished, answer = choice.finish_reason == "stop", choice.message.content or ""
        if self._grader is not None:
            async with self._slots:
                asked = question.messages(hinted=False)[-1]["content"]
                result = question.answer if isinstance(question, HeldOutQuestion) else None
                prompt = grade_prompt(asked, answer, wanted=question.hint, result=result)
                grade = await self._grader.grade(prompt, seed=seed_of(seed, "grade", question.question))
            return None if grade is None else AnswerMark(grade=grade)
        nats = None
        if self._plausibility is not None:
            async with self._slots:
                nats = await self._plausibility.mean_nats(question, answer)
        return question.mark(answer, finished=finished, hinted=self._hinted, mean_nats=nats)

    async def _ask(
        self, messages: Any, name: str, *, temperature: float | None, max_tokens: int | None, seed: int | None = None,
        persona: str = "", stop: str | None = None,
    ) -> Any:  # fmt: skip
        """Return the completion of one side turn, in a session of its own."""
        shown = self._api_keys.get(persona)
        own_key = {} if shown is None else {"Authorization": f"Bearer {shown}"}
        headers = {"X-Turn-Type": "side", "X-Session-Id": f"scorer-{self._run}-{name}", **own_key}
        async with self._slots:
            reply = await self._client.chat.completions.with_raw_response.create(
                model=self._model,
                messages=messages,
                seed=openai.omit if seed is None else seed,
                max_tokens=openai.omit if max_tokens is None else max_tokens,
                extra_headers=headers,
                temperature=openai.omit if temperature is None else temperature,
                stop=openai.omit if stop is None else stop,
            )
        version = reply.headers.get(_VERSION_HEADER)
        if version is not None:
            self.versions.add(version)
        return reply.parse()


def seed_of(*material: object) -> int:
    """Return a number below 2^31 that follows from the material alone."""
    text = "\x1f".join(map(str, material))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:4]) >> 1


def main(
    base_url: Annotated[str, typer.Option(help="of the gateway, ending in /v1")],
    problems: Annotated[
        Path, typer.Option(help="the held-out problems, and who asks, one JSON object a line", exists=True)
    ],
    everyday: Annotated[bool, typer.Option("--everyday", help="everyday requests, and no sums")] = False,
    base_engine: Annotated[
        str | None, typer.Option(help="of everyday requests: an engine of the untrained model")
    ] = None,
    base: Annotated[Path | None, typer.Option(help="the folder of that model", exists=True)] = None,
    graded_by: Annotated[
        str | None, typer.Option(help="MODEL@URL: a language model that grades answers, in place of code")
    ] = None,
    api_key: Annotated[str, typer.Option(help="the gateway's key, if it has one")] = "none",
    api_keys: Annotated[Path | None, typer.Option(help="keys of people's own, a JSON object by person")] = None,
    model: Annotated[str, typer.Option(help="the served model's name")] = "policy",
    hinted: Annotated[bool, typer.Option(help="with the right hint in each prompt: the ceiling")] = False,
    temperature: Annotated[float | None, typer.Option(help="none: the gateway's own", min=0, max=2)] = None,
    concurrency: Annotated[int, typer.Option(help="requests at once", min=1)] = 32,
    max_tokens: Annotated[int, typer.Option(help="of an answer; to everyday requests the policy's own", min=1)] = 160,
    seed: Annotated[int, typer.Option(help="of the sampling; each problem has its own from it", min=0)] = 0,
    timeout_s: Annotated[float, typer.Option(help="of one request", min=0.1)] = 120.0,
) -> None:
    """Print the share of right and well-styled first answers to the held-out problems."""
    asked: list[Any]
    try:
        read = everyday_questions if everyday else questions
        asked = [*read(problems.read_text())]
    except ValueError as error:
        print(f"{problems}: {error}. Nothing was asked.", file=sys.stderr)
        raise typer.Exit(2) from error

    if (base_engine is None) is not (base is None):
        print("--base-engine and --base are given together or not at all. Nothing was asked.", file=sys.stderr)
        raise typer.Exit(2)

    async def scored(client: openai.AsyncOpenAI) -> dict[str, object]:
        async with AsyncExitStack() as stack:
            grader = None if graded_by is None else await stack.enter_async_context(RolePlayer.open(graded_by))
            if base_engine is None or base is None:
                return await found(client, None, grader)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            return await found(client, Plausibility(SglangEngine(http, base_engine, control_s=timeout_s), base), grader)

    async def found(
        client: openai.AsyncOpenAI, plausibility: Plausibility | None, grader: RolePlayer | None
    ) -> dict[str, object]:
        scorer = Scorer(
            client, model=model, hinted=hinted, temperature=temperature, concurrency=concurrency,
            max_tokens=None if everyday else max_tokens,
            api_keys={} if api_keys is None else orjson.loads(api_keys.read_bytes()), plausibility=plausibility,
            grader=grader,
        )  # fmt: skip
        kinds = _general() if everyday and not hinted else {}
        async with asyncio.TaskGroup() as group:  # at the same time, since an engine computes many answers at once
            marking = group.create_task(scorer.mark_all(asked, seed))
            knowing = {kind: group.create_task(scorer.share_known(of, kind)) for kind, of in kinds.items()}
        marks, known = marking.result(), {kind: task.result() for kind, task in knowing.items()}
        if not any(marks):
            raise RoleUnplayed(f"{graded_by} gave no grade that can be read to any of {len(marks)} answers")
        more = {
            "by_persona": by_persona(asked, marks),
            "policy_versions": sorted(scorer.versions),
            "prompt_tokens": fmean(scorer.prompt_tokens),
        }
        return asdict(total(marks)) | more | ({"general": known} if known else {})

    print_score(scored, base_url=base_url, api_key=api_key, timeout_s=timeout_s)


def _general() -> Mapping[str, Sequence[GeneralQuestion]]:
    found = general()
    return {"facts": found.facts, "sums": found.sums}


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
    except* (openai.OpenAIError, EngineRefused, RoleUnplayed, TryLater) as failed:
        first = first_of(failed)
        print(
            f"{base_url}: {type(first).__name__}: {first}. There is no score; see the gateway, its engines and who "
            "grades.",
            file=sys.stderr,
        )
    if not is_scored:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
