"""An engine whose answers a service samples: the dialect that every engine speaks, snapshots, and a service away."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from clawstream.config import EngineSettings, Settings, TinkerSettings, TrainingSettings
from clawstream.errors import ConfigError, ServiceAway, TryLater
from clawstream.inference.engine import (
    Chunk,
    EngineRefused,
    Finish,
    FinishKind,
    GenerateRequest,
    SamplingParams,
    WeightsSpan,
)
from clawstream.inference.sglang import SglangEngine
from clawstream.inference.tinker_service import TinkerService, with_base, words_of_base
from clawstream.local.engine.server import decoder
from clawstream.local.engine.tinker import TinkerBackend, ends_in, serve
from clawstream.local.servers.server_process import reserved
from clawstream.training.tinker import TinkerTrainer
from tests.fakes import tinker_sdk
from tests.fakes.scripted_engine import serving
from tests.fakes.tinker_sdk import APIConnectionError, APIStatusError, FakeTinker
from tests.parts.training import tiny

PROMPT = tuple(range(40, 52))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The engine under test."""

    engine: SglangEngine
    backend: TinkerBackend
    fake: FakeTinker
    service: TinkerService
    model: Path


@pytest.fixture
async def subject(models: tuple[Path, Path]) -> AsyncIterator[Subject]:
    base = models[0]
    with tinker_sdk.in_place_of_the_sdk(base) as fake:
        own = TinkerSettings(url="http://127.0.0.1:1")
        service = TinkerService(Settings(environment=False, engine=EngineSettings(model_path=base), tinker=own))
        backend = TinkerBackend(service, base, ends=ends_in(base), decode=decoder(str(base)))
        async with serving(backend) as url, aiohttp.ClientSession() as session:
            engine = SglangEngine(session, url, silence_s=30, control_s=30)
            yield Subject(engine=engine, backend=backend, fake=fake, service=service, model=base)


async def answer(engine: SglangEngine, lora_name: str | None = None, **sampling: Any) -> Chunk:
    params = SamplingParams(**({"max_new_tokens": 6, "temperature": 0.0} | sampling))
    request = GenerateRequest(input_ids=PROMPT, sampling=params, lora_name=lora_name)
    (chunk,) = [chunk async for chunk in engine.generate(request)]
    return chunk


def version(subject: Subject, folder: Path) -> Path:
    """A version that the service trained, as the trainer writes it."""
    trainer = TinkerTrainer(
        subject.model, TrainingSettings(trainer="tinker", learning_rate=0.05, gate=False), subject.service
    )
    trainer.update([tiny.sample("s", reward=1)], version=1, seed=1)
    folder.mkdir()
    trainer.save(folder)
    return folder


async def test_an_answer_comes_whole_with_its_log_probs_and_the_base_s_version(subject: Subject) -> None:
    found = await answer(subject.engine)
    assert found.finish == Finish(kind=FinishKind.LENGTH)
    assert len(found.token_ids) == 6
    assert found.weight_versions == (WeightsSpan("0", 6),)
    scored = await subject.engine.score((*PROMPT, *found.token_ids), len(PROMPT))
    assert found.logprobs_nats == pytest.approx(scored, abs=1e-5)
    info = await subject.engine.server_info()
    assert (info.weight_version, info.context_length_tokens) == ("0", 2048)


async def test_a_seed_gives_the_same_answer_again(subject: Subject) -> None:
    found = [(await answer(subject.engine, temperature=1.0, sampling_seed=s)).token_ids for s in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


async def test_an_answer_ends_at_a_stop_token_and_at_a_stop_string(subject: Subject) -> None:
    whole = (await answer(subject.engine)).token_ids
    at_token = await answer(subject.engine, stop_token_ids=(whole[2],))
    assert at_token.token_ids == whole[: whole.index(whole[2]) + 1]
    assert at_token.finish == Finish(kind=FinishKind.STOP, matched=whole[2])
    decode = decoder(str(subject.model))
    assert decode is not None
    text = decode(whole[1:3])
    at_text = await answer(subject.engine, stop=(text,))
    assert at_text.finish == Finish(kind=FinishKind.STOP, matched=text)
    assert text in decode(at_text.token_ids)
    assert text not in decode(at_text.token_ids[:-1])
    assert len(at_text.logprobs_nats) == len(at_text.token_ids)


async def test_each_version_answers_under_its_own_name(subject: Subject, tmp_path: Path) -> None:
    before = await answer(subject.engine, temperature=1.0, sampling_seed=5)
    await subject.engine.load_lora_adapter("policy-v1", str(version(subject, tmp_path / "v000001")))
    assert await subject.engine.lora_adapters() == ("policy-v1",)
    under = await answer(subject.engine, "policy-v1", temperature=1.0, sampling_seed=5)
    assert under.token_ids != before.token_ids
    ids = (*PROMPT, *under.token_ids)
    assert under.logprobs_nats == pytest.approx(
        await subject.engine.score(ids, len(PROMPT), lora_name="policy-v1"), abs=1e-5
    )
    assert await answer(subject.engine, temperature=1.0, sampling_seed=5) == before
    await subject.engine.unload_lora_adapter("policy-v1")
    with pytest.raises(EngineRefused, match="policy-v1' is not loaded"):
        await answer(subject.engine, "policy-v1")


async def test_a_folder_that_names_no_snapshot_is_not_loaded(subject: Subject, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(EngineRefused, match="names no sampler_path"):
        await subject.engine.load_lora_adapter("policy-v1", str(tmp_path))
    folder = version(subject, tmp_path / "v000001")
    subject.fake.saved.clear()
    with pytest.raises(EngineRefused, match="does not have it any more"):
        await subject.engine.load_lora_adapter("policy-v1", str(folder))
    assert await subject.engine.lora_adapters() == ()


async def test_a_version_that_comes_while_the_service_is_away_is_offered_again(
    subject: Subject, tmp_path: Path
) -> None:
    """It is not rejected: that would be for good."""
    folder = version(subject, tmp_path / "v000001")
    subject.fake.fails = APIConnectionError("refused")
    with pytest.raises(TryLater, match="no answer"):
        await subject.engine.load_lora_adapter("policy-v1", str(folder))
    subject.fake.fails = None
    await subject.engine.load_lora_adapter("policy-v1", str(folder))


@pytest.mark.parametrize("wanted", [{"min_p": 0.1}, {"frequency_penalty": 0.5}, {"regex": "a+"}])
async def test_what_the_service_can_t_sample_is_refused(subject: Subject, wanted: dict[str, object]) -> None:
    body = {"input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": 2, **wanted}}
    async with aiohttp.ClientSession() as session, session.post(f"{subject.engine.url}/generate", json=body) as told:
        assert told.status == 400
        assert "not a Tinker service's" in await told.text()
    with pytest.raises(EngineRefused, match="adapters; whole weights"):
        await subject.engine.update_weights(str(subject.model), "1")


async def test_the_base_is_taken_over_as_it_is(subject: Subject) -> None:
    """The weights stage brings a fresh engine up to date, also to version 0."""
    await subject.engine.pause()
    await subject.engine.update_weights(str(subject.model), "0")
    await subject.engine.resume()
    assert await subject.engine.weight_version() == "0"
    assert len((await answer(subject.engine)).token_ids) == 6


async def test_a_service_that_is_away_drops_the_request_and_is_asked_until_it_is_back(subject: Subject) -> None:
    subject.fake.fails = APIConnectionError("refused")
    with pytest.raises(TryLater):
        await answer(subject.engine)
    assert not subject.backend.alive()
    await subject.backend.look()
    assert not subject.backend.alive()
    subject.fake.fails = None
    await subject.backend.look()
    assert subject.backend.alive()
    assert len((await answer(subject.engine)).token_ids) == 6


async def test_a_service_that_was_started_again_is_asked_in_a_new_session(subject: Subject, tmp_path: Path) -> None:
    await subject.engine.load_lora_adapter("policy-v1", str(version(subject, tmp_path / "v000001")))
    before = [await answer(subject.engine, name) for name in (None, "policy-v1")]
    subject.fake.started += 1
    for name in (None, "policy-v1"):
        with pytest.raises(TryLater):
            await answer(subject.engine, name)
    await subject.backend.look()
    await subject.backend.look()
    assert [await answer(subject.engine, name) for name in (None, "policy-v1")] == before
    assert subject.backend.alive()


async def test_a_request_that_the_service_refuses_is_refused_and_harms_nobody(subject: Subject) -> None:
    await answer(subject.engine)
    subject.fake.fails = APIStatusError("the prompt is too long", 400)
    with pytest.raises(EngineRefused, match="the prompt is too long"):
        await answer(subject.engine)
    body = {"input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": 2}}
    async with aiohttp.ClientSession() as session, session.post(f"{subject.engine.url}/generate", json=body) as told:
        assert (told.status, "too long" in await told.text()) == (400, True)
    assert subject.backend.alive()


async def test_only_answers_at_temperature_1_have_log_probs(subject: Subject) -> None:
    assert None not in (await answer(subject.engine, temperature=1.0, sampling_seed=1)).logprobs_nats
    cuts: list[dict[str, Any]] = [
        {"temperature": 0.5}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 3},
    ]  # fmt: skip
    for cut in cuts:
        found = await answer(subject.engine, sampling_seed=1, **cut)
        assert (set(found.logprobs_nats), len(found.token_ids)) == ({None}, 6), cut
    await answer(subject.engine, temperature=0.5, sampling_seed=1, top_p=0.9)
    asked = subject.fake.sampled[-1]
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed) == (0.5, 0.9, -1, 1)


async def test_a_request_that_waits_is_dropped_once_the_service_gives_no_sign_of_life(subject: Subject) -> None:
    await answer(subject.engine)
    subject.fake.flows.clear()
    waiting = asyncio.create_task(answer(subject.engine))
    while subject.backend.server_info()["internal_states"] != [{"num_requests": 1}]:
        await asyncio.sleep(0.01)
    await subject.backend.look()
    assert not waiting.done(), "the service is there, and slow"
    subject.fake.fails = APIConnectionError("refused")
    await subject.backend.look()
    with pytest.raises(TryLater):
        async with asyncio.timeout(10):
            await waiting


async def test_a_client_that_goes_away_ends_its_request(subject: Subject) -> None:
    await answer(subject.engine)
    subject.fake.flows.clear()
    waiting = asyncio.create_task(answer(subject.engine))
    async with asyncio.timeout(10):
        for num in (1, 0):
            while subject.backend.server_info()["internal_states"] != [{"num_requests": num}]:
                await asyncio.sleep(0.01)
            waiting.cancel()


async def test_a_paused_engine_answers_once_it_goes_on(subject: Subject) -> None:
    await answer(subject.engine)
    subject.fake.sampled.clear()
    await subject.engine.pause()
    waiting = asyncio.create_task(answer(subject.engine))
    while subject.backend.server_info()["internal_states"] != [{"num_requests": 1}]:
        await asyncio.sleep(0.01)
    for _ in range(5):  # the loop turns often enough for a request that does not wait
        await subject.engine.server_info()
    assert subject.fake.sampled == []
    await subject.engine.resume()
    assert len((await waiting).token_ids) == 6


async def test_a_session_that_does_not_open_is_a_service_that_is_away(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawstream.inference.tinker_service.PRESENT_WITHIN_S", 0.1)
    subject.fake.flows.clear()
    async with asyncio.timeout(10):
        with pytest.raises(ServiceAway, match="no answer for a sign of life"):
            await subject.service.present()
    subject.fake.flows.set()
    await subject.service.present()


async def test_clients_that_come_as_futures_are_waited_for(subject: Subject, tmp_path: Path) -> None:
    """As from SDKs of 2026; a snapshot that is gone is then found when it is loaded, not at the first request."""
    subject.fake.wraps = True
    await subject.engine.load_lora_adapter("policy-v1", str(version(subject, tmp_path / "v000001")))
    assert len((await answer(subject.engine, "policy-v1")).token_ids) == 6


async def test_too_few_log_probs_are_no_answer(subject: Subject) -> None:
    subject.fake.forget_values = 2
    with pytest.raises(TryLater):
        await subject.engine.score((*PROMPT, 60, 61), len(PROMPT))


async def test_a_server_notices_by_itself_that_the_service_is_away_and_back(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawstream.local.engine.tinker.ASKED_EVERY_S", 0.02)
    stop = asyncio.Event()
    with reserved() as port:
        url = f"http://127.0.0.1:{port}"
        serving_it = asyncio.create_task(serve(subject.service, subject.model, port=port, stop=stop))
        async with aiohttp.ClientSession() as session, asyncio.timeout(30):
            engine = SglangEngine(session, url, silence_s=30, control_s=30)
            await until_health(session, url, 200)
            assert len((await answer(engine)).token_ids) == 6
            subject.fake.fails = APIConnectionError("refused")
            with pytest.raises(TryLater):
                await answer(engine)
            await until_health(session, url, 503)
            subject.fake.fails = None
            await until_health(session, url, 200)
        stop.set()
        await serving_it


async def until_health(session: aiohttp.ClientSession, url: str, status: int) -> None:
    while True:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with session.get(f"{url}/health") as told:
                if told.status == status:
                    return
        await asyncio.sleep(0.01)


def test_engines_of_somebody_else_and_a_base_that_the_hosted_service_can_t_know_are_refused(
    models: tuple[Path, Path],
) -> None:
    def asked(**sections: Any) -> Settings:
        return Settings(environment=False, **sections)

    with pytest.raises(ConfigError, match=r"engine\.urls names http://127\.0\.0\.1:1"):
        with_base(asked(engine={"urls": ["http://127.0.0.1:1"], "model_path": models[0]}), None)
    with pytest.raises(ConfigError, match=r"tinker\.model"):
        with_base(asked(), str(models[0]))
    with pytest.raises(ConfigError, match="no base is named"):
        with_base(asked(), None)
    named = asked(tinker={"model": "Qwen/Qwen3-8B"}, engine={"model_path": models[0]})
    assert with_base(named, None) == (models[0], named)


def test_a_base_without_weights_has_to_have_its_words(tmp_path: Path, models: tuple[Path, Path]) -> None:
    assert words_of_base(models[0]) == models[0]
    with pytest.raises(ConfigError, match=r"no config\.json and no tokenizer\.json"):
        words_of_base(tmp_path)
