"""A whole run with everyday requests, from the first to a scored version, on a tiny model with random weights."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from clawstream.config import Settings
from clawstream.simulation.learn.cell import Order, run_cell
from clawstream.simulation.learn.grid import Cell
from clawstream.simulation.runs.people import people_of
from tests.parts.families.standins import FAMILIES, make_folder

pytestmark = pytest.mark.slow


def chatml_model(folder: Path) -> Path:
    """A model folder with SmolLM2's template."""
    tokenizer = AutoTokenizer.from_pretrained(make_folder(folder, FAMILIES["smollm2"]))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.timeout(900)  # on a machine that does much else
async def test_a_model_that_only_babbles_is_cut_complained_about_trained_and_scored(tmp_path: Path) -> None:
    people = people_of("everyday", tmp_path / "people", num_scored=1)
    cell = Cell(
        scenario="everyday", base="smollm2", base_sha="tiny", problems_sha=people.sha, method="combined", seed=0,
        control=None, updates=1, learning_rate=1e-3, epochs=1, lora_rank=2, hurry=False, score_at=(0, 1), w_topk=1.0,
        split="report",
    )  # fmt: skip
    base, folder = chatml_model(tmp_path / "base"), tmp_path / "run"
    order = Order(cell=cell, people=people, base=base, cache_dir=Settings(environment=False).cache_dir)

    found = await run_cell(order, folder)

    assert [(step.update, step.samples) for step in found.steps] == [(1, 16)]
    assert found.steps[0].mean_length is not None
    assert 40 < found.steps[0].mean_length <= 80
    assert found.requests_failed == 0
    scored = found.scores[1]
    assert (scored.num_problems, scored.num_right) == (3, 0)
    assert set(scored.by_persona or {}) == {"cook", "clerk", "traveller"}
    assert scored.general is not None
    assert scored.general.perplexity is not None
    assert scored.general.perplexity > 100
