"""What holds on vLLM alone: where it does otherwise than the contract's other engines, and what its client refuses."""

import asyncio
import re
from contextlib import aclosing
from pathlib import Path

import pytest

from clawstream.errors import TryLater
from clawstream.events import PolicyActivated, Shaping
from clawstream.inference.engine import EngineRefused, FinishKind, GenerateRequest, SamplingParams, WeightsSpan
from clawstream.inference.vllm import LOST, VllmEngine
from clawstream.weights.taking import take_over
from tests.parts.engine.conftest import ON_VLLM, Subject
from tests.parts.engine.contract.asking import answer, asking
from tests.parts.engine.tiny_model import make_model
from tests.unit.monitoring.said import published

pytestmark = pytest.mark.parametrize("subject", [pytest.param("vllm", marks=ON_VLLM)], indirect=True)

PROMPT = tuple(range(40, 60))
WITHIN_S = 90


def fresh(subject: Subject) -> VllmEngine:
    """A client that knows nothing of what others loaded, as after a restart."""
    return VllmEngine(subject.session, subject.url, silence_s=30, control_s=30)


async def num_running(subject: Subject) -> float:
    async with subject.session.get(f"{subject.url}/metrics") as response:
        told = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)", await response.text(), re.MULTILINE)
    assert told
    return sum(map(float, told))


async def test_closing_the_stream_ends_the_request_at_the_engine_even_while_it_is_paused(subject: Subject) -> None:
    async with aclosing(subject.engine.generate(asking(PROMPT, 1900))) as chunks:
        await anext(chunks)
        assert await num_running(subject) == 1
        await subject.engine.pause()
    await subject.engine.resume()
    async with asyncio.timeout(WITHIN_S):
        num_tokens = 0
        while await num_running(subject):
            num_tokens += len((await answer(subject.engine, asking(PROMPT, 20))).token_ids)
    assert num_tokens < 1700


async def test_a_prompt_beyond_the_context_is_refused_and_an_answer_ends_where_the_context_does(
    subject: Subject,
) -> None:
    with pytest.raises(EngineRefused, match="longer than the maximum model length") as refusal:
        await answer(subject.engine, asking([40] * 5000))
    cut = await answer(subject.engine, asking([40] * 2000, 100))
    assert refusal.value.status == 400
    assert (len(cut.token_ids), cut.finish.kind) == (48, FinishKind.LENGTH)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
async def test_logprobs_are_those_at_the_sampling_temperature(subject: Subject, temperature: float) -> None:
    told = await answer(subject.engine, asking(PROMPT, 12, temperature=temperature))
    at_one = await subject.engine.score(PROMPT + told.token_ids, len(PROMPT))
    assert told.logprobs_nats != pytest.approx(at_one, abs=1e-2)
    again = await answer(subject.engine, asking(PROMPT, 1, temperature=temperature))
    assert len(again.logprobs_nats) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_new_tokens=4, top_p=0.9),
        SamplingParams(max_new_tokens=4, top_k=5),
        SamplingParams(max_new_tokens=4, shaping=Shaping(min_p=0.1)),
        SamplingParams(max_new_tokens=4, temperature=0.001),
    ],
    ids=["top_p", "top_k", "min_p", "nearly greedy"],
)
async def test_where_vllm_cannot_tell_a_logprob_it_is_none(subject: Subject, sampling: SamplingParams) -> None:
    request = GenerateRequest(input_ids=PROMPT, sampling=sampling, top_logprobs_num=2)
    chunks = [chunk async for chunk in subject.engine.generate(request)]
    assert [value for chunk in chunks for value in chunk.logprobs_nats] == [None] * 4
    assert not any(chunk.top_logprobs for chunk in chunks)


async def test_a_load_that_was_not_finished_is_named_by_no_version(subject: Subject) -> None:
    await subject.engine.pause()
    async with subject.session.post(f"{subject.url}/update_weight_version", json={"new_version": "1>2"}) as response:
        assert response.status == 200
    assert await subject.engine.weight_version() == "1"
    await subject.engine.resume()
    assert await subject.engine.weight_version() == "1"  # it is still paused
    async with subject.session.post(f"{subject.url}/resume") as response:  # by somebody else
        assert response.status == 200
    assert await subject.engine.weight_version() == "1>2"
    assert (await answer(subject.engine, asking(PROMPT, 3))).versions == (WeightsSpan("1>2", 3),)


async def test_weights_that_are_lost_leave_it_paused_until_it_takes_a_version_over(
    subject: Subject, tmp_path: Path
) -> None:
    engine, broken = fresh(subject), with_files_cut_off(subject.other_model, tmp_path)
    await engine.pause()
    with pytest.raises(EngineRefused, match=r"not loaded.*file not fully covered"):
        await engine.update_weights(broken, "2")
    await engine.resume()
    waiting = asyncio.create_task(answer(engine, asking(PROMPT, 3)))
    await asyncio.wait({waiting}, timeout=1)
    assert (await engine.weight_version(), waiting.done()) == (LOST, False)
    outcome = await take_over(engine, published(3, str(subject.other_model)), lambda: 0)
    assert isinstance(outcome, PolicyActivated)
    async with asyncio.timeout(WITHIN_S):
        assert (await waiting).versions == (WeightsSpan("3", 3),)


def with_files_cut_off(model: Path, folder: Path) -> str:
    for file in model.iterdir():
        content = file.read_bytes()
        (folder / file.name).write_bytes(content[:-1000] if file.suffix == ".safetensors" else content)
    return str(folder)


async def test_files_that_vllm_can_t_read_are_refused_and_the_weights_before_serve_on(
    subject: Subject, tmp_path: Path
) -> None:
    before = await answer(subject.engine, asking(PROMPT, 6))
    with pytest.raises(EngineRefused, match=r"not loaded.*file not fully covered"):
        await subject.engine.update_weights(with_files_cut_off(subject.other_model, tmp_path), "2")
    after = await answer(subject.engine, asking(PROMPT, 6))
    assert (after.token_ids, after.versions) == (before.token_ids, (WeightsSpan("1", 6),))


async def test_a_model_whose_output_head_is_its_embedding_is_not_loaded_on_a_cpu(
    subject: Subject, tmp_path: Path
) -> None:
    before = await answer(subject.engine, asking(PROMPT, 6))
    with pytest.raises(EngineRefused, match="tie_word_embeddings"):
        await subject.engine.update_weights(str(make_model(tmp_path, width=128)), "2")
    after = await answer(subject.engine, asking(PROMPT, 6))
    assert (after.token_ids, after.versions) == (before.token_ids, (WeightsSpan("1", 6),))


async def test_an_adapter_of_a_higher_rank_than_vllm_was_started_for_is_rejected_in_its_words(
    subject: Subject, tmp_path: Path
) -> None:
    from tests.parts.engine.contract.test_adapters import save_adapter

    folder = save_adapter(subject.model, tmp_path / "adapter", rank=64)
    with pytest.raises(EngineRefused, match=r"rank 64 .*16"):
        await subject.engine.load_lora_adapter("policy-v2", folder)
    assert await subject.engine.lora_adapters() == ()


async def test_nobody_is_asked_where_nobody_answers(subject: Subject) -> None:
    nobody = VllmEngine(subject.session, "http://127.0.0.1:9")
    with pytest.raises(TryLater, match="no answer"):
        await nobody.server_info()
