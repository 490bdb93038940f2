"""An adapter made by peft, from the policy topic through a real engine to a recorded answer."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from clawstream.events import ExchangeCompleted, PolicyActivated
from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.server_process import reserved
from clawstream.stream import topics
from clawstream.stream.stage import Record
from clawstream.weights.stage import keep_current
from tests.bench.replicas import Replica, healthy
from tests.fakes.memory_log import MemoryLog
from tests.parts.engine.contract.test_adapters import save_adapter
from tests.parts.engine.tiny_model import make_model
from tests.parts.gateway.running_gateway import RunningGateway, running_gateway, until
from tests.sessions import history
from tests.unit.monitoring.said import published

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("lora") / "base")


@pytest.fixture(scope="module")
def engine_url(model: Path) -> Iterator[str]:
    with reserved() as port:
        engine = Replica(model=model, port=port)
        engine.start()
        yield engine.url
        engine.end()


@pytest.mark.timeout(600)
async def test_published_adapters_are_loaded_asked_for_labelled_and_unloaded(
    model: Path, engine_url: str, tmp_path: Path
) -> None:
    adapter = save_adapter(model, tmp_path / "adapter")
    log, stop = MemoryLog(), asyncio.Event()
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:
        engine = SglangEngine(http, engine_url)
        while not await healthy(http, engine_url):
            await asyncio.sleep(0.05)
        tasks.create_task(keep_current([engine], log, policy_id="policy", stop=stop, ask_every_s=0.05, drain_s=0.0))
        async with running_gateway(model, log=log, engine_urls=(engine_url,)) as gateway:
            await until(gateway.ready)
            await log.append([published(0, str(model))])
            for version in range(1, 5):
                await log.append([replace(published(version, adapter), adapter=f"policy-v{version}")])
                await _until_asked_of(gateway, version)
            await _until_loaded(engine, ("policy-v3", "policy-v4"))
            exchanges = await gateway.recorded(ExchangeCompleted, at_least=5)
        stop.set()
    activated = [event for event in await _policy(log) if isinstance(event, PolicyActivated)]
    assert [(event.policy_version, event.adapter) for event in activated if event.adapter] == [
        (version, f"policy-v{version}") for version in range(1, 5)
    ]
    _check_logprobs(model, adapter, exchanges)


async def _until_asked_of(gateway: RunningGateway, version: int) -> None:
    async def answered() -> bool:
        response = await gateway.chat(temperature=1.0, max_tokens=6, seed=version)
        return response.headers["x-policy-version"] == str(version)

    await until(answered)


async def _until_loaded(engine: SglangEngine, names: tuple[str, ...]) -> None:
    async def loaded() -> bool:
        return await engine.lora_adapters() == names

    await until(loaded)


def _check_logprobs(model: Path, adapter: str, exchanges: list[ExchangeCompleted]) -> None:
    """What is labelled 0 was sampled by the base, all else under the adapter, by plain transformers and peft."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    prompts = history(exchanges)
    versions = [exchange.versions[0].policy_version for exchange in exchanges]
    said = [_logprobs(base, exchange, prompts[exchange.exchange_id].token_ids) for exchange in exchanges]
    tuned = PeftModel.from_pretrained(base, adapter).eval()
    adapted = [_logprobs(tuned, exchange, prompts[exchange.exchange_id].token_ids) for exchange in exchanges]
    for version, exchange, by_base, by_adapter in zip(versions, exchanges, said, adapted, strict=True):
        right, wrong = (by_base, by_adapter) if version == 0 else (by_adapter, by_base)
        assert list(exchange.output_logprobs) == pytest.approx(right, abs=2e-3)
        assert list(exchange.output_logprobs) != pytest.approx(wrong, abs=2e-3)
    assert {1, 4} <= set(versions)


@torch.inference_mode()
def _logprobs(model: torch.nn.Module, exchange: ExchangeCompleted, prompt: tuple[int, ...]) -> list[float]:
    ids = torch.tensor([[*prompt, *exchange.output_ids]])
    logp = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].float(), -1)
    values: list[float] = logp.gather(1, ids[0, len(prompt) :, None]).squeeze(1).tolist()
    return values


async def _policy(log: MemoryLog) -> list[object]:
    batches = log.follow((topics.POLICY,), until_end=True)
    return [record.event async for records in batches for record in records if isinstance(record, Record)]
