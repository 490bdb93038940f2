"""32 keys, each with an adapter of its own, on two real engines behind a real gateway: who answers whom.

Each version of each key's adapter makes the model say one token that nothing else makes it say, and so does the base,
so an answer tells by itself who gave it. Meanwhile versions are published and taken over, old ones are unloaded, and
one engine is killed and started again with nothing but the base.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from clawstream.events import ExchangeCompleted, PolicyActivated, PolicyPublished, PolicyRejected
from clawstream.gateway.access.key_file import add_key
from clawstream.gateway.access.keys import Allowance
from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.server_process import reserved
from clawstream.stream import topics
from clawstream.stream.stage import Record
from clawstream.weights.stage import keep_current
from tests.bench.replicas import Replica, healthy
from tests.fakes.memory_log import MemoryLog
from tests.parts.engine.tiny_model import make_model
from tests.parts.gateway.running_gateway import RunningGateway, running_gateway, until
from tests.unit.monitoring.said import published

pytestmark = pytest.mark.slow
NUM_KEYS, NUM_VERSIONS = 32, 3
KEYS = tuple(f"key-v{number}" for number in range(NUM_KEYS))  # names that look like versions are names as well
WITHIN_S = 400.0
Marks = Mapping[int, tuple[str | None, int]]  # by the token that it says: the key and version of an adapter; the base


class Made(NamedTuple):
    """A model, and the adapters on it."""

    model: Path
    adapters: Mapping[tuple[str, int], Path]
    marks: Marks


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("keys")
    model = make_model(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    said = base.get_input_embeddings().weight
    _hold_one_feature_constant(base)
    _say(base.state_dict(), "weight", 1, 10.0, said[NUM_KEYS * NUM_VERSIONS])
    base.save_pretrained(model)
    config = LoraConfig(
        r=1, lora_alpha=1, target_modules=["gate_proj", "up_proj", "down_proj"], layers_to_transform=[1]
    )
    tuned = get_peft_model(base, config)
    versions = [(key, version) for version in range(1, NUM_VERSIONS + 1) for key in KEYS]
    adapters = {}
    for token, (key, version) in enumerate(versions):
        factors = {name: value.zero_() for name, value in tuned.state_dict().items() if ".lora_" in name}
        for name, value in factors.items():
            if "lora_A" in name:
                value[0, 0] = 1.0
        _say(factors, "lora_B.default.weight", 0, 100.0, said[token])
        adapters[key, version] = folder / f"policy+{key}-v{version}"
        tuned.save_pretrained(adapters[key, version])
    return Made(model, adapters, {NUM_KEYS * NUM_VERSIONS: (None, 0)} | dict(enumerate(versions)))


@torch.no_grad()
def _hold_one_feature_constant(base: Any) -> None:
    """The first feature of the hidden state is 4.0 whatever was read, and all embeddings are of one length."""
    embeddings = base.get_input_embeddings().weight
    embeddings[:, 0] = 0.0
    embeddings *= 8.0 / embeddings.norm(dim=1, keepdim=True)
    embeddings[:, 0] = 4.0
    for layer in base.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[:, 0] = 0.0  # a unit for adapters


@torch.no_grad()
def _say(weights: Mapping[str, torch.Tensor], kind: str, unit: int, gain: float, embedding: torch.Tensor) -> None:
    """Let one unit of the last layer rest on the constant feature, and put out the token's embedding."""
    mlp = {name: value for name, value in weights.items() if ".layers.1.mlp." in name and name.endswith(kind)}
    gate, up, down = (next(value for name, value in mlp.items() if part in name) for part in ("gate", "up", "down"))
    gate[unit, 0] = up[unit, 0] = gain
    down[1:, unit] = embedding[1:] / embedding[1:].norm()


@pytest.fixture
def engines(made: Made) -> Iterator[Sequence[Replica]]:
    with ExitStack() as stack:
        found = [Replica(model=made.model, port=stack.enter_context(reserved()), forked=True) for _ in range(2)]
        for engine in found:
            engine.start()
            stack.callback(engine.end)
        yield found


@pytest.mark.timeout(900)
async def test_no_key_is_answered_by_anothers_adapter_while_32_are_published_taken_over_and_lost(
    made: Made, engines: Sequence[Replica], tmp_path: Path
) -> None:
    keys = {name: add_key(tmp_path / "keys.json", name, Allowance()) for name in KEYS}
    log, stop, statuses, newest = MemoryLog(), asyncio.Event(), Counter[int](), dict.fromkeys(KEYS, 0)
    started = time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as tasks:
        clients = [SglangEngine(http, engine.url) for engine in engines]
        await _all_healthy(http, engines)
        tasks.create_task(
            keep_current(clients, log, policy_id="policy", by_key=True, stop=stop, ask_every_s=0.1, drain_s=0.5)
        )
        urls = [engine.url for engine in engines]
        async with running_gateway(
            made.model, log=log, engine_urls=urls, data_dir=tmp_path, adapters="by_key"
        ) as gateway:
            await until(gateway.ready)
            asking = [tasks.create_task(_ask(gateway, name, key, statuses, newest)) for name, key in keys.items()]
            await log.append([published(0, str(made.model))])
            await _publish(log, made, 1)
            await _until_active(log, urls, 1)
            await _publish(log, made, 2)
            engines[1].end()
            await _until_active(log, urls[:1], 2)
            engines[1].start()
            await _publish(log, made, 3)
            await _until_active(log, urls, 3)
            await _until_all_are_answered_by(3, newest)
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
            exchanges = await gateway.recorded(ExchangeCompleted)
        loaded = await _until_one_each(clients)
        stop.set()
    took_over = [event for event in await _policy(log) if isinstance(event, PolicyActivated)]
    judged = _judged(exchanges, made.marks)
    print(judged, {
        "keys": NUM_KEYS, "versions": NUM_VERSIONS, "takeovers": len(took_over), "adapters_loaded_at_the_end": loaded,
        "statuses": dict(statuses), "wall_s": round(time.monotonic() - started, 1),
    })  # fmt: skip
    assert judged["by_anothers_adapter"] == judged["mislabelled"] == 0
    assert judged["by_own_adapter"] > NUM_KEYS * NUM_VERSIONS
    assert judged["by_base"] > 0
    assert [event for event in await _policy(log) if isinstance(event, PolicyRejected)] == []
    assert {event.adapter == f"{event.policy_id}-v{event.policy_version}" for event in took_over} == {False, True}


async def _ask(gateway: RunningGateway, name: str, key: str, statuses: Counter[int], newest: dict[str, int]) -> None:
    """Ask again and again, each time in a session of its own; never returns."""
    headers = {"Authorization": f"Bearer {key}"}
    while True:
        words = [{"role": "user", "content": random.choice(("What is 2+2?", "Who?"))}]  # prompts that all keys share
        response = await gateway.chat(words, headers=headers, max_tokens=4, temperature=1.0)
        statuses[response.status] += 1
        newest[name] = int(response.headers.get("x-policy-version", newest[name]))
        await asyncio.sleep(0.2)


def _judged(exchanges: Sequence[ExchangeCompleted], marks: Marks) -> dict[str, int]:
    """Who gave each answer, by what it says; and whether the log says so too."""
    found = Counter(dict.fromkeys(("by_own_adapter", "by_base", "by_anothers_adapter", "mislabelled"), 0))
    for exchange in exchanges:
        marked = {marks.get(token) for token in exchange.output_ids}
        mark = marked.pop() if len(marked) == 1 else None
        key, version = mark or ("?", -1)
        found[{None: "by_base", exchange.key_name: "by_own_adapter"}.get(key, "by_anothers_adapter")] += 1
        versions = {span.policy_version for span in exchange.versions}
        found["mislabelled"] += (exchange.policy_id, versions) != (f"policy+{exchange.key_name}", {version})
    return dict(found) | {"answers": len(exchanges)}


async def _publish(log: MemoryLog, made: Made, version: int) -> None:
    """Publish that version of every key's adapter, in any order."""
    for key in random.sample(KEYS, NUM_KEYS):
        name = f"policy+{key}-v{version}"
        event: PolicyPublished = replace(
            published(version, str(made.adapters[key, version])), policy_id=f"policy+{key}", adapter=name
        )
        await log.append([event])


async def _until_active(log: MemoryLog, urls: Sequence[str], version: int) -> None:
    wanted = {(url, f"policy+{key}", version) for url in urls for key in KEYS}
    async with asyncio.timeout(WITHIN_S):
        while True:
            events = await _policy(log)
            there = {(e.engine, e.policy_id, e.policy_version) for e in events if isinstance(e, PolicyActivated)}
            if wanted <= there:
                return
            await asyncio.sleep(0.2)


async def _until_all_are_answered_by(version: int, newest: Mapping[str, int]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while set(newest.values()) != {version}:
            await asyncio.sleep(0.2)


async def _until_one_each(clients: Sequence[SglangEngine]) -> list[int]:
    """Return how many adapters each engine has once it has the newest of each key's, and no other."""
    wanted = {f"policy+{key}-v{NUM_VERSIONS}" for key in KEYS}
    async with asyncio.timeout(WITHIN_S):
        while True:
            loaded = [set(await client.lora_adapters()) for client in clients]
            if all(names == wanted for names in loaded):
                return [len(names) for names in loaded]
            await asyncio.sleep(0.1)


async def _all_healthy(http: aiohttp.ClientSession, engines: Sequence[Replica]) -> None:
    async with asyncio.timeout(WITHIN_S):
        for engine in engines:
            while not await healthy(http, engine.url):
                await asyncio.sleep(0.1)


async def _policy(log: MemoryLog) -> list[object]:
    batches = log.follow((topics.POLICY,), until_end=True)
    return [record.event async for records in batches for record in records if isinstance(record, Record)]
