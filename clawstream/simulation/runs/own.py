"""The policy, the engines, the judge and the trainer of a person's settings, in place of simulated ones.

The one rule: a run sets only its own things: its data, log, database and people, and how it trains where it is compared
with others. All else of the four sections comes from the person's settings.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import TypeVar

from clawstream.config import IDLE, EngineSettings, Section, Settings, TrainingSettings
from clawstream.errors import TryLater
from clawstream.inference.engine import EngineRefused
from clawstream.inference.sglang import SglangEngine, engine_session

log = logging.getLogger(__name__)

MAX_TOKENS = 512  # of an answer
BASE_VERSION = "0"
S = TypeVar("S", bound=Section)


def blended(run: Settings, own: Settings) -> Settings:
    """Return the settings of a run, with a person's own parts for what it leaves open; nothing is validated."""
    idle, _ = IDLE.get(run.training.method, ((), ""))  # with one of several methods; another may need them
    training = own.training.model_copy(update={name: TrainingSettings.model_fields[name].default for name in idle})
    return run.model_copy(
        update={
            "policy": _over(own.policy, run.policy, run.policy.model_fields_set - {"renderer", "enable_thinking"}),
            "engine": _over(own.engine, run.engine, run.engine.model_fields_set),
            "judge": run.judge if own.judge.url is None else own.judge,
            "training": _over(training, run.training, run.training.model_fields_set),
        }
    )


def digest(own: Settings) -> str:
    """Return a name for the base policy and all that asks, judges and trains it; OSError where there is no folder."""
    folder = own.engine.base_policy
    files = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir() if p.is_file())
    sections = [section.model_dump_json() for section in (own.policy, own.engine, own.judge, own.training)]
    return hashlib.sha256(json.dumps([files, *sections]).encode()).hexdigest()[:16]


@contextlib.asynccontextmanager
async def lent(engine: EngineSettings, base: Path) -> AsyncIterator[None]:
    """Let engines at addresses serve the base when the block begins and ends, without the block's adapters.

    No other client may ask them meanwhile. Embedded engines, which have no address, end with their run. Raises TryLater
    where an engine does not answer at first. If one does not answer at the end, or refuses, that is logged, and the
    others are given back.
    """
    async with engine_session(engine) as http:
        engines = [SglangEngine(http, url) for url in engine.urls]
        known = [set(await one.lora_adapters()) for one in engines]
        for one in engines:
            await _reset(one, base)
        try:
            yield
        finally:
            for one, before in zip(engines, known, strict=True):
                try:
                    await _give_back(one, base, before)
                except (TryLater, EngineRefused) as error:
                    log.warning(
                        "engine=%s state=not given back reason=%s; start it anew, or load %s", one.url, error, base
                    )


async def _give_back(engine: SglangEngine, base: Path, before: set[str]) -> None:
    for name in set(await engine.lora_adapters()) - before:
        await engine.unload_lora_adapter(name)
    await _reset(engine, base)


async def _reset(engine: SglangEngine, base: Path) -> None:
    await engine.pause(retract=True)
    try:
        await engine.update_weights(str(await asyncio.to_thread(base.absolute)), BASE_VERSION, flush_cache=True)
    finally:
        await engine.resume()


def _over(own: S, run: S, names: Iterable[str]) -> S:
    return own.model_copy(update={name: getattr(run, name) for name in names})
