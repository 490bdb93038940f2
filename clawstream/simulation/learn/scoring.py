"""Scores of published checkpoints, each in an engine of its own behind a gateway of its own, apart from any run.

A score depends on the files on disk alone, and on no cache, optimizer or log of a run. Its problems are on no log that
a policy is trained on.
"""

import asyncio
import contextlib
import math
import statistics
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from clawstream.config import (
    EngineSettings,
    GatewaySettings,
    KafkaSettings,
    PolicySettings,
    Settings,
    dump,
    inherited_environment,
)
from clawstream.events import PolicyActivated, policy_of_key
from clawstream.inference.clients import engine_client, engine_session
from clawstream.inference.engine import adapter_name
from clawstream.inference.http_engine import HttpEngine
from clawstream.inference.model_folder import ADAPTER_CONFIG
from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.accounts import write_private
from clawstream.local.servers.kafka import EmbeddedKafka
from clawstream.local.servers.server_process import HOST, answers, reserved
from clawstream.local.supervisor import Part, Patience, Supervisor
from clawstream.simulation.everyday import general
from clawstream.simulation.runs.figures import VersionScore
from clawstream.simulation.runs.people import People
from clawstream.simulation.runs.programs import ScorerProcess, keys_for
from clawstream.simulation.runs.scenarios import MAX_TOKENS, ScenarioPrograms, blended, lent
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.connect import connected
from clawstream.stream.stage import now_ms

SEED = 0  # of the sampling: the same for all scores, which are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointScoring:
    """A place where checkpoints are scored, one after the other."""

    folder: Path
    kafka: KafkaSettings
    problems: Path  # held out
    cast: ScenarioPrograms
    own: Settings | None = None  # a person's settings, whose engines (if they have addresses) serve the checkpoints
    key: str | None = None  # the API key whose adapter a checkpoint is; None: it answers everybody
    api_keys: Path | None = None  # for the scorer
    graded_by: str | None = None  # a language model, as MODEL@URL; None: code marks the answers

    async def score(self, checkpoint: Path, version: int, *, base: Path, hinted: bool = False) -> VersionScore:
        """Return the score of the weights in `checkpoint`, or of the adapter in it on `base`.

        Raises PartUnavailable where an answer is missing.
        """
        adapted = (checkpoint / ADAPTER_CONFIG).is_file()
        served = base if adapted else checkpoint
        policy_id = f"scored-{uuid.uuid4().hex[:8]}"
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as http,
            Supervisor(
                self.folder,
                environment=inherited_environment(),
                say=lambda _: None,
                patience=Patience(ready_within_s=self.cast.limits.ready_s),
            ) as supervisor,
            self._served(served, 0 if adapted else version, supervisor, http, base=base, adapted=adapted) as engine,
        ):
            if adapted:
                await self._load(engine, policy_id, checkpoint, version)
            untrained = await self._untrained(engine, served, supervisor, http, base=base)
            with reserved() as port:
                config = self._config(served, engine.url, port, policy_id)
                await supervisor.start([_gateway(config, http, port)])
                scorer = ScorerProcess(
                    f"http://{HOST}:{port}", self.problems, self.folder / "logs", cast=self.cast, seed=SEED,
                    temperature=self.cast.temperature, max_tokens=None if self.own is None else MAX_TOKENS,
                    api_keys=self.api_keys, base=None if untrained is None else (untrained, base),
                    graded_by=self.graded_by,
                )  # fmt: skip
                found = await scorer.score(version, hinted=hinted)
                if found.general is None:
                    return found
                perplexity = await _perplexity(engine, served, adapter_name(policy_id, version) if adapted else None)
                return replace(found, general=replace(found.general, perplexity=perplexity))

    @contextlib.asynccontextmanager
    async def _served(
        self, folder: Path, version: int, supervisor: Supervisor, http: aiohttp.ClientSession, *, base: Path,
        adapted: bool,
    ) -> AsyncIterator[HttpEngine]:  # fmt: skip
        """An engine that serves the weights in `folder`: a fresh one here, or a person's, lent for the block."""
        if self.own is None or not self.own.engine.urls:
            with reserved() as port:
                engine = SglangEngine(http, f"http://{HOST}:{port}")
                await supervisor.start([_engine(folder, version, http, engine.url, adapted=adapted)])
                yield engine
            return
        async with lent(self.own.engine, base), engine_session(self.own.engine) as session:
            lent_engine = engine_client(self.own.engine)(session, self.own.engine.urls[0])
            if folder != base:
                await lent_engine.update_weights(str(await asyncio.to_thread(folder.absolute)), str(version))
            yield lent_engine

    async def _untrained(
        self, engine: HttpEngine, served: Path, supervisor: Supervisor, http: aiohttp.ClientSession, *, base: Path
    ) -> str | None:
        """Return the address of an engine that also serves the untrained model; None: nobody asks for it."""
        if not self.cast.everyday or self.graded_by is not None:
            return None
        if served == base:
            return engine.url
        with reserved() as port:
            url = f"http://{HOST}:{port}"
            await supervisor.start([_engine(base, 0, http, url, adapted=False, name="untrained")])
        return url

    async def _load(self, engine: HttpEngine, policy_id: str, checkpoint: Path, version: int) -> None:
        """Have the engine serve the adapter, and write that to the log, where the gateway reads it."""
        policy_id = policy_of_key(policy_id, self.key)
        name = adapter_name(policy_id, version)
        await engine.load_lora_adapter(name, str(await asyncio.to_thread(checkpoint.absolute)))
        loaded = PolicyActivated(
            policy_id=policy_id, policy_version=version, engine=engine.url, adapter=name, pause_ms=0.0, num_bytes=0,
            activated_at_ms=now_ms(),
        )  # fmt: skip
        async with connected(self.kafka, client_id="scoring") as log:
            await log.append([loaded])

    def _config(self, checkpoint: Path, engine: str, port: int, policy_id: str) -> Path:
        settings = Settings(
            environment=False,
            data_dir=self.folder.absolute(),
            kafka=self.kafka,
            engine=EngineSettings(model_path=str(checkpoint.absolute()), urls=(engine,)),
            gateway=GatewaySettings(port=port, default_max_tokens=self.cast.answer_tokens),
            policy=PolicySettings(
                id=policy_id,
                served_model="policy",
                renderer=self.cast.renderer,
                enable_thinking=None if self.cast.renderer == "auto" else False,
                adapters="shared" if self.key is None else "by_key",
            ),
        )
        config = self.folder / "settings.json"
        write_private(config, dump(settings if self.own is None else blended(settings, self.own)))
        return config


@contextlib.asynccontextmanager
async def room(
    folder: Path, people: People, cache_dir: Path, *, own: Settings | None = None, key: str | None = None
) -> AsyncIterator[CheckpointScoring]:
    """A place to score in, with a log of its own that is empty at first.

    With a `key`, each person asks under a key of their own, and the checkpoints are adapters of `key`.
    """
    with EmbeddedKafka(folder / "kafka", fresh=True, cache_dir=cache_dir) as kafka:
        access = KafkaSettings(**kafka.access)
        await admin.apply(kafka.bootstrap, security=access)
        yield CheckpointScoring(
            folder=folder, kafka=access, problems=people.scored, cast=people.cast, own=own, key=key,
            api_keys=None if key is None else keys_for(people.scenario, folder / "keys.json", folder),
            graded_by=people.roles.scorer,
        )  # fmt: skip


async def _perplexity(engine: HttpEngine, model: Path, adapter: str | None) -> float:
    """Return the perplexity of a text that nobody speaks of in a run."""
    from clawstream.rendering.encoding import load_tokenizer  # which takes seconds to import, for transformers

    tokenizer = await asyncio.to_thread(load_tokenizer, model, trust_code=False)
    token_ids = tokenizer.encode(general().text)
    return math.exp(-statistics.fmean(await engine.score(token_ids, 1, lora_name=adapter)))


def _engine(
    checkpoint: Path, version: int, http: aiohttp.ClientSession, url: str, *, adapted: bool, name: str = "engine"
) -> Part:
    return Part(
        name=name,
        command=(sys.executable, "-m", "clawstream.local.engine", "--model-path", str(checkpoint),
                 "--port", url.rpartition(":")[2], "--weight-version", str(version),
                 "--dtype", "float16" if adapted else "float32"),
        missing=answers(http, f"{url}/health"),
    )  # fmt: skip


def _gateway(config: Path, http: aiohttp.ClientSession, port: int) -> Part:
    return Part(
        name="gateway",
        command=(sys.executable, "-m", "clawstream", "--config", str(config), "gateway"),
        missing=answers(http, f"http://{HOST}:{port}/readyz"),
    )
