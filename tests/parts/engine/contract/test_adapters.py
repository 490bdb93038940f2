"""LoRA adapters over HTTP, on the engines that have them without a GPU."""

import asyncio
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from clawstream.inference.engine import EngineRefused
from clawstream.inference.http_engine import HttpEngine
from tests.parts.engine.conftest import ON_VLLM, Subject
from tests.parts.engine.contract.asking import answer, asking, whole

PROMPT = tuple(range(40, 60))


def save_adapter(model: Path, folder: Path, *, rank: int = 4) -> str:
    """A peft folder whose adapter changes what the model says."""
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(r=rank, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("subject", ["cpu", pytest.param("vllm", marks=ON_VLLM)], indirect=True)
async def test_adapter_serves_those_who_name_it_until_it_is_unloaded(subject: Subject, tmp_path: Path) -> None:
    engine: HttpEngine = subject.engine
    plain = await answer(engine, asking(PROMPT, 12))
    await engine.load_lora_adapter("tuned", save_adapter(subject.model, tmp_path / "adapter"))
    tuned = await answer(engine, asking(PROMPT, 12, lora_name="tuned"))
    again = await answer(engine, asking(PROMPT, 12))
    scores = await engine.score(PROMPT + tuned.token_ids, len(PROMPT), lora_name="tuned")
    await engine.unload_lora_adapter("tuned")
    assert tuned.logprobs_nats != pytest.approx(plain.logprobs_nats, abs=1e-3)
    assert again.token_ids == plain.token_ids
    assert scores == pytest.approx(tuned.logprobs_nats, abs=2e-4)
    with pytest.raises(EngineRefused, match=r"not loaded|does not exist"):
        await answer(engine, asking(PROMPT, 1, lora_name="tuned"))


@pytest.mark.parametrize("subject", ["cpu", "scripted", pytest.param("vllm", marks=ON_VLLM)], indirect=True)
async def test_what_runs_under_an_adapter_ends_under_it_and_nothing_new_may_name_it(
    subject: Subject, tmp_path: Path
) -> None:
    engine: HttpEngine = subject.engine
    await engine.load_lora_adapter("tuned", save_adapter(subject.model, tmp_path / "adapter"))
    chunks = engine.generate(asking(PROMPT, 60, lora_name="tuned"))
    said = [await anext(chunks)]
    unloading = asyncio.create_task(engine.unload_lora_adapter("tuned"))
    while await engine.lora_adapters():
        await asyncio.sleep(0)
    with pytest.raises(EngineRefused, match=r"not loaded|does not exist"):
        await answer(engine, asking(PROMPT, 1, lora_name="tuned"))
    said += [chunk async for chunk in chunks]
    await unloading
    assert len(whole(said).token_ids) == 60


@pytest.mark.parametrize("subject", ["cpu", pytest.param("vllm", marks=ON_VLLM)], indirect=True)
async def test_folder_without_an_adapter_is_refused(subject: Subject, tmp_path: Path) -> None:
    with pytest.raises(EngineRefused, match=r"can't be read|No adapter found"):
        await subject.engine.load_lora_adapter("empty", str(tmp_path))
