"""Asks two versions of the policy the same past requests, with the recorded prompts, so that answers can be compared.

Nothing is written to the log, and no engine that serves people is asked: each version gets an engine of its own.
"""

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from clawstream.config import GatewaySettings, Settings, inherited_environment
from clawstream.errors import OperatorError
from clawstream.inference.engine import GenerateRequest, SamplingParams, adapter_name
from clawstream.inference.model_folder import ADAPTER_CONFIG
from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.server_process import answers, reserved
from clawstream.local.supervisor import Part, Supervisor
from clawstream.projections.look.sql import rows_of
from clawstream.rendering.renderer import PromptRenderer
from clawstream.replay.comparing import Pair, UnrelatedTask

AT_ONCE = 8
CONFIG = "config.json"
# The versions that `before` and `after` were trained from, themselves included. After a rollback the next version comes
# from an older one, so it lacks what the versions in between learned.
_LINES = """
    WITH RECURSIVE lines (asked, policy_version) AS (
        VALUES ({before}::bigint, {before}::bigint), ({after}::bigint, {after}::bigint)
        UNION
        SELECT lines.asked, b.parent_version
        FROM lines
        JOIN batches AS b ON b.policy_id = '{policy_id}' AND b.policy_version = lines.policy_version
    )
"""
_PAST = """
    SELECT e.exchange_id AS turn_id, last_user_text(request_messages(e.exchange_id)) AS request,
        request_token_ids(e.exchange_id) AS prompt_ids
    FROM exchanges AS e
    JOIN turns AS t ON t.turn_id = e.exchange_id AND t.kind = 'paired'
    WHERE e.kind = 'completed' AND e.turn_type = 'main' AND e.policy_id = '{policy_id}'
        AND e.exchange_id NOT IN (
            SELECT s.turn_id
            FROM lines
            JOIN batches AS b ON b.policy_id = '{policy_id}' AND b.policy_version = lines.policy_version
            JOIN samples AS s ON s.sample_id = ANY (b.sample_ids)
        )
    ORDER BY md5(e.exchange_id || '{seed}')
    LIMIT {count}
"""
_VERSIONS = """
    SELECT DISTINCT ON (policy_version) policy_version, path, adapter
    FROM policies WHERE policy_id = '{policy_id}' ORDER BY policy_version, source_offset
"""
_LEARNED = """
    SELECT DISTINCT policy_version, turn_id, total_reward AS reward, hint, next_state
    FROM lineage
    WHERE policy_id = '{policy_id}' AND next_state IS NOT NULL
        AND policy_version IN (
            SELECT policy_version FROM lines WHERE asked = {after}
            EXCEPT
            SELECT policy_version FROM lines WHERE asked = {before}
        )
    ORDER BY policy_version, turn_id
"""
_MAX_NEW_TOKENS = 1024  # of an answer, where gateway.default_max_tokens is not set


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalVersion:
    """A version of the policy whose files are on this machine."""

    number: int
    path: Path
    adapter: bool  # whether it is an adapter on the base's weights


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRequest:
    """A request of the past."""

    turn_id: str
    request: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedTurn:
    """A turn with what the person said next, and the version that learned from it."""

    policy_version: int
    turn_id: str
    reward: float | None
    hint: str | None
    next_state: str


def versions(url: str, settings: Settings) -> dict[int, LocalVersion]:
    """Return the versions that can be asked: those on the log whose files are on this machine's disk."""
    found = [
        LocalVersion(number=row["policy_version"], path=Path(row["path"]), adapter=row["adapter"] is not None)
        for row in rows_of(url, _VERSIONS.format(policy_id=settings.policy.id))
    ]
    return {v.number: v for v in found if (v.path / (ADAPTER_CONFIG if v.adapter else CONFIG)).is_file()}


def past(url: str, policy_id: str, *, before: int, after: int, count: int, seed: int) -> list[PastRequest]:
    """Return `count` answered requests at random, or all if there are fewer; equal seeds choose the same ones.

    Neither of the two versions, nor any version that they were trained from, was trained on these requests.
    """
    query = _LINES + _PAST
    rows = rows_of(url, query.format(policy_id=policy_id, before=before, after=after, seed=seed, count=count))
    return [
        PastRequest(turn_id=row["turn_id"], request=str(row["request"]), prompt_ids=tuple(row["prompt_ids"]))
        for row in rows
        if row["prompt_ids"] is not None
    ]


def learned(url: str, policy_id: str, *, before: int, after: int) -> list[LearnedTurn]:
    """Return, in order, the turns that `after` and its ancestors learned from, but not `before` or its ancestors."""
    rows = rows_of(url, (_LINES + _LEARNED).format(policy_id=policy_id, before=before, after=after))
    return [LearnedTurn(**row) for row in rows]


@contextlib.asynccontextmanager
async def asked(
    settings: Settings, base: Path, wanted: Sequence[LocalVersion], folder: Path
) -> AsyncIterator[list["VersionEngine"]]:
    """Run an engine for each version until the block ends, with logs in `folder`; adapters are put on `base`.

    Raises PartUnavailable, with the end of the engine's log, where an engine does not come up.
    """
    renderer = PromptRenderer.of(settings.policy, base)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        supervisor = Supervisor(folder, environment=inherited_environment(), say=lambda _: None)
        await stack.enter_async_context(supervisor)
        ports = [stack.enter_context(reserved()) for _ in wanted]
        parts = [_engine(version, base, port, http) for version, port in zip(wanted, ports, strict=True)]
        await supervisor.start(parts)
        answering = []
        for version, port in zip(wanted, ports, strict=True):
            engine = SglangEngine(http, f"http://127.0.0.1:{port}")
            name = adapter_name(settings.policy.id, version.number) if version.adapter else None
            if name is not None:
                await engine.load_lora_adapter(name, str(version.path))
            answering.append(
                VersionEngine(version=version, engine=engine, adapter=name, renderer=renderer, gateway=settings.gateway)
            )
        yield answering


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionEngine:
    """A version, and an engine that answers with it."""

    version: LocalVersion
    engine: SglangEngine
    adapter: str | None  # the adapter's name on the engine; None: the version is not an adapter
    renderer: PromptRenderer
    gateway: GatewaySettings

    async def answer(self, prompt_ids: Sequence[int], *, temperature: float, seed: int) -> str:
        """Return the version's answer to the prompt."""
        sampling = SamplingParams(
            max_new_tokens=self.gateway.default_max_tokens or _MAX_NEW_TOKENS,
            temperature=temperature,
            stop_token_ids=self.renderer.stop_token_ids,
            sampling_seed=seed,
        )
        request = GenerateRequest(input_ids=prompt_ids, sampling=sampling, lora_name=self.adapter)
        sampled: list[int] = []
        async for chunk in self.engine.generate(request):
            sampled += chunk.token_ids
        message = self.renderer.parse(sampled, prompt_ids, {})
        calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
        return "\n".join(part for part in (message.content.strip(), *calls) if part)

    async def solves(self, task: UnrelatedTask) -> bool:
        """Return whether the version's likeliest answer to the task is right."""
        prompt_ids = self.renderer.prompt_ids([{"role": "user", "content": task.question}], {})
        return task.accepts(await self.answer(prompt_ids, temperature=0.0, seed=0))


async def pairs(
    before: VersionEngine,
    after: VersionEngine,
    requests: Sequence[PastRequest],
    *,
    temperature: float,
    seed: int,
    tell: Callable[[], None],
) -> list[Pair]:
    """Return both versions' answers to each request; which is shown first is random. Call `tell` after each request."""
    room = asyncio.Semaphore(AT_ONCE)

    async def pair(request: PastRequest) -> Pair:
        drawn = random.Random(f"{seed} {request.turn_id}")
        sampling_seed = drawn.randrange(2**31)
        async with room:
            both = [
                await one.answer(request.prompt_ids, temperature=temperature, seed=sampling_seed)
                for one in (before, after)
            ]
        tell()
        return Pair(
            turn_id=request.turn_id, request=request.request, before=both[0], after=both[1],
            after_first=drawn.random() < 0.5,
        )  # fmt: skip

    return list(await asyncio.gather(*map(pair, requests)))


def chosen(found: dict[int, LocalVersion], number: int | None, *, default: int) -> LocalVersion:
    """Return version `number` (None: `default`); where it is missing, OperatorError lists those that there are."""
    wanted = default if number is None else number
    if wanted not in found:
        there = ", ".join(map(str, sorted(found)))
        raise OperatorError(
            f"version {wanted} is not on this machine's disk; there are {there}. Nothing was asked. Name one of them "
            "(training.keep_checkpoints says how many are kept)"
        )
    return found[wanted]


def _engine(version: LocalVersion, base: Path, port: int, http: aiohttp.ClientSession) -> Part:
    folder = base if version.adapter else version.path
    command = (
        sys.executable, "-m", "clawstream.local.engine", "--model-path", str(folder), "--port", str(port),
        "--weight-version", str(version.number), "--dtype", "float16" if version.adapter else "float32",
    )  # fmt: skip
    ready = answers(http, f"http://127.0.0.1:{port}/health")
    return Part(name=f"version-{version.number}", command=command, missing=ready)
