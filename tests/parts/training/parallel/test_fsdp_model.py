"""A model that FSDP cuts over two processes says what it says whole, and none of them ever holds the whole."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from clawstream.training.processes import Processes
from clawstream.training.step.losses import Suffix
from clawstream.training.torch_model import TorchModel
from tests.parts.training.parallel import families
from tests.parts.training.step import head_memory

pytestmark = pytest.mark.timeout(300)  # the processes' first imports take half a minute on a busy machine

QUESTIONS = "tests.parts.training.parallel.fsdp_questions"
SUFFIXES = [Suffix(list(range(5)), list(range(9, 30)), 1.0), Suffix([3, 1, 2], [7, 7, 8], 0.7)]


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 3], ids=["all weights", "adapter"])
@pytest.mark.parametrize("family", families.CONFIGS)
def test_log_probs_are_transformers_own(
    two: Processes, models: dict[str, Path], tmp_path: Path, family: str, lora_rank: int | None
) -> None:
    whole = TorchModel.load(models[family], lora_rank=lora_rank)
    expected = whole.score(SUFFIXES, weights=None, budget_tokens=64)
    two.ask(f"{QUESTIONS}:load", models[family], lora_rank)

    assert_said(two, expected)
    if lora_rank is not None:
        (tmp_path / "whole").mkdir()
        (tmp_path / "cut").mkdir()
        whole.save(tmp_path / "whole")
        two.ask(f"{QUESTIONS}:save", tmp_path / "cut")
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_an_adapter_is_put_on_a_model_whose_files_name_its_weights_otherwise(
    two: Processes, models: dict[str, Path], tmp_path: Path
) -> None:
    """As transformers reads the files of a model without a head: it knows what is missing before their names."""
    base = families.build(tmp_path / "renamed", "qwen3")
    file = base / "model.safetensors"
    save_file({name.removeprefix("model."): value for name, value in load_file(file).items()}, file, {"format": "pt"})
    two.ask(f"{QUESTIONS}:load", base, 3)

    assert_said(two, TorchModel.load(models["qwen3"], lora_rank=3).score(SUFFIXES, weights=None, budget_tokens=64))


@pytest.mark.slow
def test_a_head_in_the_files_is_not_tied_to_another_embedding_whatever_the_configuration_says(
    two: Processes, models: dict[str, Path], tmp_path: Path
) -> None:
    """As transformers reads them."""
    base = families.build(tmp_path / "both", "qwen3")
    file = base / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].roll(1, 0)
    save_file(tensors | {"lm_head.weight": head}, file, {"format": "pt"})
    expected = TorchModel.load(base).score(SUFFIXES, weights=None, budget_tokens=64)
    tied = TorchModel.load(models["qwen3"]).score(SUFFIXES, weights=None, budget_tokens=64)
    assert not torch.allclose(expected[0], tied[0], atol=0.1)

    two.ask(f"{QUESTIONS}:load", base)

    assert_said(two, expected)


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 8], ids=["all weights", "adapter"])
def test_a_process_takes_memory_for_its_part_alone_while_it_loads(
    two: Processes, tmp_path: Path, lora_rank: int | None
) -> None:
    config = Qwen3Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    whole_bytes = (tmp_path / "model.safetensors").stat().st_size
    assert whole_bytes > 150 * 2**20

    for grew_bytes in two.ask(f"{QUESTIONS}:load", tmp_path, lora_rank):
        assert 0.5 * whole_bytes < grew_bytes < 0.8 * whole_bytes


@pytest.mark.slow
def test_memory_of_logits_is_bounded_however_many_tokens_are_scored_and_learned_from(
    two: Processes, tmp_path: Path
) -> None:
    limit_bytes = head_memory.HEAD_ROWS * 4 * head_memory.VOCABULARY
    two.ask(f"{QUESTIONS}:load", families.build(tmp_path, "qwen3", vocabulary=head_memory.VOCABULARY))

    for largest_bytes, most_bytes in two.ask(f"{QUESTIONS}:head_bytes", head_memory.suffixes(8), limit_bytes):
        assert 0 < largest_bytes <= limit_bytes
        assert most_bytes <= 4 * limit_bytes  # logits, and thrice that computed from them


def assert_said(processes: Processes, expected: list[torch.Tensor]) -> None:
    """Assert that every process says that of the answers."""
    for found in processes.ask(f"{QUESTIONS}:score", SUFFIXES):
        for mine, its in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, its, atol=1e-4, rtol=0)
