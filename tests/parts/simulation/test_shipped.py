"""The policy that the package brings: what its recipe makes, loaded as a built one is, and as good."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from clawstream.errors import PartUnavailable
from clawstream.simulation.marks import mark, questions, total
from clawstream.simulation.policy import build
from clawstream.simulation.policy import recipe as base
from clawstream.simulation.policy.dialogues import with_hint as hinted
from clawstream.simulation.policy.recipe import RECIPES, base_policy
from clawstream.simulation.runs.people import people_of
from clawstream.simulation.runs.run import SCENARIO, TEMPERATURE
from tests.renderers import load_renderer

HOLDS = 0.1  # two scores of 200 problems each that are this near are those of one policy, in 95 of 100 cases
MAX_ANSWER_TOKENS = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_policy(tmp_path_factory.mktemp("cache"))


def score_of(folder: Path, problems: Path, *, with_hint: bool) -> float:
    """Return the share of the demonstration's held-out problems that it answers right and in the wanted style."""
    asked = questions(people_of(SCENARIO, problems).scored.read_text())
    model = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)
    renderer = load_renderer(folder, renderer="qwen3", enable_thinking=False)
    prompts = [hinted(q.prompt, q.hint) if with_hint else q.prompt for q in asked]
    rows = [renderer.prompt_ids([{"role": "user", "content": prompt}], {}) for prompt in prompts]
    longest, pad = max(map(len, rows)), model.generation_config.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows])
    seen = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = model.generate(
            ids, attention_mask=seen, do_sample=True, temperature=TEMPERATURE, top_k=0, max_new_tokens=MAX_ANSWER_TOKENS
        )
    end = model.generation_config.eos_token_id
    answers = [[*row[: row.index(end)], end] if end in row else row for row in found[:, longest:].tolist()]
    texts = [renderer.parse(tuple(ids), row, {}).content or "" for ids, row in zip(answers, rows, strict=True)]
    return total([mark(question, text) for question, text in zip(asked, texts, strict=True)]).score


def test_it_is_made_by_the_recipe_that_the_code_has() -> None:
    assert base.made_by() == RECIPES["demo"].digest()


def test_nobody_waits_for_it_to_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("built"))
    first = base_policy(tmp_path)
    assert [first, first] == [base_policy(tmp_path), *tmp_path.iterdir()]


def test_its_weights_are_in_single_precision_once_they_are_unpacked(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {np.dtype(np.float32)}
    half = load_file(base.SHIPPED / "model.safetensors")
    assert all((weights[name] == tensor).all() for name, tensor in half.items())


def test_a_damaged_one_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base.pack(base_policy(tmp_path / "cache"), tmp_path / "package", recipe=RECIPES["demo"].digest())
    with (tmp_path / "package" / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        weights.write(b"\xff")
    monkeypatch.setattr(base, "SHIPPED", tmp_path / "package")
    with pytest.raises(PartUnavailable, match=r"model\.safetensors has SHA-256 .* is expected"):
        base_policy(tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_prefers_the_unwanted_style_and_can_do_the_wanted_one_with_the_hint(folder: Path, tmp_path: Path) -> None:
    assert 0.1 < score_of(folder, tmp_path, with_hint=False) < 0.3
    assert score_of(folder, tmp_path, with_hint=True) > 0.95


@pytest.mark.rebuild
@pytest.mark.timeout(1500)
def test_what_its_recipe_makes_today_is_as_good(folder: Path, tmp_path: Path) -> None:
    places = ("--cache-dir", str(tmp_path / "cache"), "--pack", str(tmp_path / "package"))
    command = [sys.executable, "-m", build.__name__, *places]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=True)
    built = Path(done.stdout.strip())
    for with_hint in (False, True):
        scores = [score_of(one, tmp_path / "problems", with_hint=with_hint) for one in (folder, built)]
        assert abs(scores[0] - scores[1]) < HOLDS, (with_hint, scores)
    names = {file.name for file in base.SHIPPED.iterdir()}
    assert names == {file.name for file in (tmp_path / "package").iterdir()}


def test_who_only_asks_for_the_folder_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from clawstream.simulation.policy.recipe import base_policy\n"
        f"base_policy(Path({str(tmp_path)!r})); print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
