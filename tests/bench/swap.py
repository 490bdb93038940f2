"""Weights change every few seconds under load: what the streams notice, and whether each token's version is true.

The two checkpoints sample disjoint sets of tokens, so a token itself proves which of them sampled it. One phase
without swaps and one of equal length with them, on the same engine and load, one after the other.
"""

import asyncio
import enum
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import aiohttp
import typer

from clawstream.errors import TryLater
from clawstream.events import PolicyActivated, PolicyPublished
from clawstream.inference.engine import (
    Chunk,
    EngineRefused,
    FinishKind,
    GenerateRequest,
    SamplingParams,
)
from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.server_process import reserved
from clawstream.weights.taking import swap as take_over
from tests.bench.report import report
from tests.parts.engine.disjoint_models import make_disjoint_models
from tests.parts.engine.process import cpu_engine
from tests.parts.sglang.process import sglang_engine

ANSWER_TOKENS = 200
PROMPT_TOKENS = 32


class Served(enum.StrEnum):
    """Which engine is measured."""

    SGLANG = "sglang"
    CPU = "cpu"


def swap(
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    engine: Annotated[Served, typer.Option()] = Served.SGLANG,
    seconds: Annotated[float, typer.Option(min=1)] = 60.0,
    streams: Annotated[int, typer.Option(min=1)] = 16,
    every: Annotated[float, typer.Option(min=0.1)] = 2.0,
) -> None:
    """A swap every few seconds under streams, between checkpoints whose tokens are disjoint."""
    with tempfile.TemporaryDirectory() as folder:
        models = make_disjoint_models(Path(folder))
        with _served(engine, models[0], streams) as url:
            figures = asyncio.run(_measure(url, models, seconds=seconds, streams=streams, every_s=every))
    report({"engine": engine.value} | figures, json_file)


@contextmanager
def _served(engine: Served, model: Path, rows: int) -> Iterator[str]:
    start = sglang_engine if engine is Served.SGLANG else cpu_engine
    options = ("--max-running-requests", str(rows), "--weight-version", "0")
    with reserved() as port, start(model, port, *options) as url:
        yield url


@dataclass(slots=True, kw_only=True)
class _Heard:
    """What the streams of one phase came to."""

    requests: int = 0
    failed: int = 0
    mixed: int = 0
    mislabelled: int = 0
    tokens: int = 0
    gaps_ms: list[float] = field(default_factory=list)

    def add(self, chunks: list[Chunk]) -> None:
        """Count one answer; one that is cut short or refused is a failure."""
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        spans = chunks[-1].weight_versions if chunks else ()
        names = [span.version for span in spans for _ in range(span.num_tokens)]
        finish = chunks[-1].finish if chunks else None
        self.requests += 1
        self.tokens += len(tokens)
        self.failed += finish is None or finish.kind is not FinishKind.LENGTH or len(tokens) != ANSWER_TOKENS
        self.mixed += len(spans) > 1
        # The even versions are the weights that sample even ids.
        truth = [token % 2 for token in tokens]
        named = [int(name) % 2 for name in names]
        self.mislabelled += sum(a != b for a, b in zip(truth, named, strict=False)) + abs(len(truth) - len(named))


@dataclass(slots=True, kw_only=True)
class _Load:
    """Streams that ask again and again while `heard` is set; the version in force keeps their caches apart."""

    engine: SglangEngine
    version: int = 0
    heard: _Heard | None = None

    async def keep_asking(self, number: int) -> None:
        rng = random.Random(number)
        while (heard := self.heard) is not None:
            sampling = SamplingParams(max_new_tokens=ANSWER_TOKENS, temperature=1.0, ignore_eos=True)
            prompt = [rng.randrange(33, 127) for _ in range(PROMPT_TOKENS)]
            request = GenerateRequest(input_ids=prompt, sampling=sampling, extra_key=str(self.version))
            chunks: list[Chunk] = []
            last: float | None = None
            with suppress(TryLater, EngineRefused):
                async for chunk in self.engine.generate(request):
                    now = time.perf_counter()
                    if last is not None:
                        heard.gaps_ms.append((now - last) * 1000)
                    last = now
                    chunks.append(chunk)
            heard.add(chunks)


@asynccontextmanager
async def _loaded(load: _Load, streams: int) -> AsyncIterator[_Heard]:
    load.heard = heard = _Heard()
    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(load.keep_asking(number))
        yield heard
        load.heard = None


async def _measure(
    url: str, models: tuple[Path, Path], *, seconds: float, streams: int, every_s: float
) -> dict[str, float | int]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        load = _Load(engine=SglangEngine(http, url))
        async with _loaded(load, streams):  # warms up
            await asyncio.sleep(min(seconds, 5.0))
        async with _loaded(load, streams) as calm:
            await asyncio.sleep(seconds)
        async with _loaded(load, streams) as swapped:
            activated = await _swap_for(load, models, seconds=seconds, every_s=every_s)
    ordered = sorted(calm.gaps_ms)
    return {
        "streams": streams,
        "swaps": len(activated),
        "requests": swapped.requests,
        "failed": calm.failed + swapped.failed,
        "max_gap_ms": max(swapped.gaps_ms),
        "gap_p999_ms_without_swaps": ordered[int(len(ordered) * 0.999)],
        "max_gap_ms_without_swaps": ordered[-1],
        "gap_p50_ms_without_swaps": ordered[len(ordered) // 2],
        "engine_pause_ms_max": max(event.pause_ms for event in activated),
        "mixed_version_answers": swapped.mixed,
        "mislabelled_tokens": calm.mislabelled + swapped.mislabelled,
        "tokens": swapped.tokens,
    }


async def _swap_for(load: _Load, models: tuple[Path, Path], *, seconds: float, every_s: float) -> list[PolicyActivated]:
    """Swaps, with what production swaps with, at the times `every_s`, 2 `every_s`, ... up to `seconds`."""
    begun = time.perf_counter()
    activated: list[PolicyActivated] = []
    for number in range(1, int(seconds / every_s) + 1):
        await asyncio.sleep(max(0.0, begun + number * every_s - time.perf_counter()))
        version = load.version + 1
        outcome = await take_over(load.engine, _published(version, models[version % 2]), lambda: 0)
        if not isinstance(outcome, PolicyActivated):
            raise TypeError(f"swap {number}: the engine did not take version {version} over: {outcome.reason}")
        load.version = version
        activated.append(outcome)
    return activated


def _published(version: int, folder: Path) -> PolicyPublished:
    return PolicyPublished(
        policy_id="policy",
        policy_version=version,
        parent_version=version - 1,
        path=str(folder),
        adapter=None,
        manifest_sha256="0" * 64,
        num_bytes=sum(file.stat().st_size for file in folder.iterdir()),
        published_at_ms=0,
    )
