"""Weights in half precision: near to the exact ones, and taken for few tokens of a large model alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from clawstream.local.engine import model as model_module
from clawstream.local.engine.core import Core
from clawstream.local.engine.model import RowModel
from tests.parts.engine.test_core import ask, logprobs_of, run

NEAR_NATS = 0.01
PROMPT = range(20)


@pytest.fixture
def halved(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> RowModel:
    if torch.backends.quantized.engine not in model_module._PACKS_HALVES:
        pytest.skip("torch packs no halves for this processor, and the engine multiplies by exact weights")
    monkeypatch.setattr(model_module, "SMALL_PARAMETERS", 0)
    torch.set_num_threads(1)
    return RowModel(str(models[0]), in_halves=True)


def answered(model: RowModel, prompt: Sequence[int], adapter: Path | None = None) -> tuple[list[int], list[float]]:
    core, name = Core(model, num_rows=4, version="1", decode=None), None
    if adapter is not None:
        core.adapters.add(name := "a", core.adapters.read(str(adapter)))
    _, heard = ask(core, prompt, 12, temperature=1.0, lora_name=name)
    run(core)
    return [*prompt, *heard.token_ids], heard.logprobs


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def distance(found: Sequence[float], exact: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(found, exact, strict=True))


def test_log_probs_are_near_the_exact_ones_and_not_the_same(halved: RowModel, models: tuple[Path, Path]) -> None:
    tokens, found = answered(halved, PROMPT)
    assert 1e-6 < distance(found, logprobs_of(plain(models[0]), tokens, len(PROMPT))) < NEAR_NATS


def test_weights_that_are_swapped_in_are_the_ones_that_count(halved: RowModel, models: tuple[Path, Path]) -> None:
    halved.apply(halved.read_weights(str(models[1])))
    tokens, found = answered(halved, PROMPT)
    assert distance(found, logprobs_of(plain(models[1]), tokens, len(PROMPT))) < NEAR_NATS
    assert distance(found, logprobs_of(plain(models[0]), tokens, len(PROMPT))) > 10 * NEAR_NATS


def test_an_adapter_counts_on_top_of_halves(halved: RowModel, models: tuple[Path, Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    tuned = get_peft_model(plain(models[0]), config).eval()
    tuned.save_pretrained(tmp_path)
    tokens, found = answered(halved, PROMPT, tmp_path)
    assert distance(found, logprobs_of(tuned, tokens, len(PROMPT))) < NEAR_NATS


def _many_tokens(_: pytest.MonkeyPatch) -> bool:
    return True


def _a_small_model(monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.undo()
    return True


def _nobody_asked(_: pytest.MonkeyPatch) -> bool:
    return False


@pytest.mark.parametrize("case", [_many_tokens, _a_small_model, _nobody_asked])
def test_else_weights_are_exact(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, case: Callable[[pytest.MonkeyPatch], bool]
) -> None:
    monkeypatch.setattr(model_module, "SMALL_PARAMETERS", 0)
    model = RowModel(str(models[0]), in_halves=case(monkeypatch))
    if case is _many_tokens:
        monkeypatch.setattr(model_module, "_FEW_TOKENS", 0)
    tokens, found = answered(model, PROMPT)
    assert found == pytest.approx(logprobs_of(plain(models[0]), tokens, len(PROMPT)), abs=1e-5)
