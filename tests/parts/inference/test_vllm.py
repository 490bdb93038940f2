"""The client of vLLM where vLLM fails, hangs in between or was started in another way."""

import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path

import aiohttp
import pytest

from clawstream.errors import TryLater
from clawstream.inference.engine import Chunk, EngineRefused, FinishKind, GenerateRequest, SamplingParams, WeightsSpan
from clawstream.inference.vllm import LOST, VllmEngine
from tests.fakes.vllm_server import ScriptedVllm, serving_vllm

REQUEST = GenerateRequest(input_ids=[1, 2], sampling=SamplingParams(max_new_tokens=2))


@pytest.fixture
def server() -> ScriptedVllm:
    return ScriptedVllm()


@pytest.fixture
async def engine(server: ScriptedVllm) -> AsyncIterator[VllmEngine]:
    async with serving_vllm(server) as url, aiohttp.ClientSession() as session:
        yield VllmEngine(session, url, silence_s=5, control_s=5)


async def answered(engine: VllmEngine, request: GenerateRequest = REQUEST) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


async def test_the_chunk_that_ends_an_answer_has_the_weights_and_the_counts(engine: VllmEngine) -> None:
    *_, last = chunks = await answered(engine)
    assert [token for chunk in chunks for token in chunk.token_ids] == [5, 5]
    assert last.finish is not None
    assert last.finish.kind is FinishKind.LENGTH
    assert (last.weight_versions, last.prompt_tokens, last.cached_tokens) == ((WeightsSpan("default", 2),), 2, 1)


async def test_an_answer_that_breaks_off_is_for_later(engine: VllmEngine, server: ScriptedVllm) -> None:
    server.ends_after = 2
    with pytest.raises(TryLater, match="ended without a finish"):
        await answered(engine)


async def test_the_mode_is_asked_once_and_again_after_a_failure(engine: VllmEngine, server: ScriptedVllm) -> None:
    await answered(engine)
    await engine.server_info()
    await answered(engine)
    assert server.num_probes == 1
    server.ends_after = 1
    with pytest.raises(TryLater):
        await answered(engine)
    server.probed, server.ends_after = (-0.1, -2.0), 3  # it came back with other flags
    for _ in range(2):
        with pytest.raises(TryLater, match="--logprobs-mode processed_logprobs"):
            await answered(engine)
    with pytest.raises(TryLater, match="--logprobs-mode processed_logprobs"):
        await engine.server_info()


async def test_a_swap_names_the_weights_only_once_they_are_whole_and_alone(
    engine: VllmEngine, server: ScriptedVllm
) -> None:
    await engine.pause()
    await engine.update_weights("/v1", "1")
    await engine.resume()
    assert server.asked == [
        "/pause?mode=keep",
        "/update_weight_version default>1",
        "/collective_rpc /v1",
        "/reset_prefix_cache?reset_running_requests=true&reset_external=true",
        "/update_weight_version 1",
        "/resume",
    ]
    assert await engine.weight_version() == "1"


async def test_a_swap_pauses_by_itself_where_nobody_did(engine: VllmEngine, server: ScriptedVllm) -> None:
    await engine.update_weights("/v1", "1")
    assert (server.asked[0], server.asked[-1], server.paused) == ("/pause?mode=keep", "/resume", False)


async def test_a_cache_that_is_not_emptied_leaves_it_paused_and_unnamed(
    engine: VllmEngine, server: ScriptedVllm
) -> None:
    server.empties = False
    with pytest.raises(TryLater, match="prefix cache"):
        await engine.update_weights("/v1", "1")
    assert (server.name, server.paused, await engine.weight_version()) == ("default>1", True, "default")
    server.empties = True
    await engine.update_weights("/v1", "1")
    await engine.resume()
    assert (server.name, server.paused) == ("1", False)


@pytest.mark.parametrize("taken", [True, False], ids=["a version", "what it was started with"])
async def test_a_load_that_fails_is_undone(engine: VllmEngine, server: ScriptedVllm, taken: bool) -> None:
    if taken:
        await engine.update_weights("/v1", "1")
    server.unreadable = ("/v2",)
    with pytest.raises(EngineRefused, match=r"/v2 is not loaded: no weights at <path>") as refusal:
        await engine.update_weights("/v2", "2")
    assert refusal.value.status == 400
    assert (server.name, server.folder) == (("1", "/v1") if taken else ("default", "/models/first"))
    assert not server.paused


async def test_a_load_that_fails_and_can_t_be_undone_leaves_it_paused_until_a_load_succeeds(
    engine: VllmEngine, server: ScriptedVllm
) -> None:
    server.name, server.unreadable = "7", ("/v8",)  # somebody else loaded 7
    with pytest.raises(EngineRefused):
        await engine.update_weights("/v8", "8")
    await engine.resume()
    assert (server.name, server.paused, await engine.weight_version()) == (LOST, True, LOST)
    await engine.update_weights("/v9", "9")
    await engine.resume()
    assert (server.name, server.paused) == ("9", False)


async def test_a_paused_engine_says_what_it_is(engine: VllmEngine, server: ScriptedVllm) -> None:
    server.paused, server.name = True, LOST
    info = await engine.server_info()
    assert (info.model_path, info.context_length_tokens, info.weight_version) == ("/models/first", 64, LOST)
    assert server.num_probes == 0


@pytest.mark.parametrize(("config", "loads"), [({"tie_word_embeddings": False}, True), ({}, False), (None, False)])
async def test_on_a_cpu_only_weights_with_an_output_head_of_their_own_are_loaded(
    engine: VllmEngine, server: ScriptedVllm, tmp_path: Path, config: dict[str, bool] | None, loads: bool
) -> None:
    server.backend = "CPUAttentionBackendImpl"
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with nullcontext() if loads else pytest.raises(EngineRefused, match="tie_word_embeddings"):
        await engine.update_weights(str(tmp_path), "1")
    assert (server.name, server.paused) == ("1" if loads else "default", False)


async def test_a_load_by_a_dead_engine_is_for_later(engine: VllmEngine, server: ScriptedVllm) -> None:
    server.dead = True
    with pytest.raises(TryLater, match="503"):
        await engine.update_weights("/v1", "1")
    assert server.name == "default>1"


async def test_weights_that_are_named_and_not_paused_are_no_version(engine: VllmEngine, server: ScriptedVllm) -> None:
    server.name = "1>2"
    assert await engine.weight_version() == "1>2"
    server.paused = True
    assert await engine.weight_version() == "1"


async def test_an_adapter_that_is_not_there_is_a_refusal_and_a_route_that_is_not_there_is_none(
    engine: VllmEngine,
) -> None:
    with pytest.raises(EngineRefused, match="`policy-v3` does not exist"):
        await answered(engine, GenerateRequest(input_ids=[1], sampling=REQUEST.sampling, lora_name="policy-v3"))
    with pytest.raises(TryLater, match=r"404.*engine\.urls"):
        await engine.load_lora_adapter("policy-v3", "/v3")


async def test_without_its_routes_for_training_only_adapters_change() -> None:
    async with serving_vllm(ScriptedVllm(dev_mode=False)) as url, aiohttp.ClientSession() as session:
        engine = VllmEngine(session, url)
        await engine.resume()
        assert (await engine.server_info()).weight_version is None
        for asked in (engine.pause(), engine.update_weights("/v1", "1")):
            with pytest.raises(EngineRefused, match="VLLM_SERVER_DEV_MODE=1"):
                await asked
