"""The simulated policy as a folder: built once, whole or not at all, and loaded by those who serve and train it."""

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from clawstream.simulation.policy import build, recipe
from clawstream.simulation.policy.dialogues import Mix
from clawstream.simulation.policy.recipe import Recipe
from tests.renderers import load_renderer

SHORT = Recipe(steps=3, batch_dialogues=4, warm_up_steps=1)
CHANGES = {"seed": 1, "width": 64, "steps": 4, "matrix_rate": 0.01, "mix": Mix(plain=0.5)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.ensure(tmp_path_factory.mktemp("cache"), SHORT)


def test_the_folder_is_what_an_engine_and_the_gateway_load(built: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(built), local_files_only=True)
    renderer = load_renderer(built, renderer="qwen3", enable_thinking=False)
    prompt_ids = renderer.prompt_ids([{"role": "user", "content": "What is 2 + 3?"}], {})

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt_ids])).logits

    assert logits.shape == (1, len(prompt_ids), len(recipe.build()))
    assert logits.isfinite().all()
    assert model.config.model_type == "qwen3"
    assert 600_000 < sum(p.numel() for p in model.parameters()) < 700_000
    assert model.generation_config.eos_token_id in renderer.stop_token_ids


def test_a_policy_of_the_same_recipe_is_not_built_again(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build", lambda _recipe: pytest.fail("built again"))

    assert build.ensure(built.parent, SHORT) == built


@pytest.mark.parametrize("field", CHANGES)
def test_another_recipe_is_another_policy(field: str) -> None:
    changed = dataclasses.replace(SHORT, **{field: CHANGES[field]})  # type: ignore[arg-type]

    assert changed.digest() != SHORT.digest()


def test_other_words_are_another_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    before = SHORT.digest()
    monkeypatch.setattr("clawstream.simulation.policy.dialogues.OPENERS", ("well, ",))

    assert SHORT.digest() != before


def test_the_same_recipe_gives_the_same_weights(built: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(str(built), local_files_only=True)

    again = build.build(SHORT)

    assert all(torch.equal(loaded.get_parameter(name), p) for name, p in again.named_parameters())


def test_nothing_is_left_when_building_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(_folder: Path, _words: tuple[str, ...]) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(recipe, "save", full_disk)

    with pytest.raises(OSError, match="no space left"):
        build.ensure(tmp_path, SHORT)
    assert list(tmp_path.iterdir()) == []


def test_two_that_build_at_once_end_with_one_whole_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_built = threading.Barrier(2, timeout=30)
    save = recipe.save

    def save_together(folder: Path, words: tuple[str, ...]) -> None:
        save(folder, words)
        both_built.wait()

    monkeypatch.setattr(recipe, "save", save_together)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build.ensure(tmp_path, SHORT))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert found[0] == found[1]
    assert list(tmp_path.iterdir()) == [found[0]]
    assert (found[0] / "model.safetensors").is_file()


def test_building_leaves_the_random_numbers_of_others_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    build.ensure(tmp_path, SHORT)

    assert torch.equal(torch.rand(3), expected)


def test_a_lesson_is_the_gateways_prompt_and_an_answer_that_ends(built: Path) -> None:
    lesson, dialogue = build.lessons_of(SHORT)[0], SHORT.dialogues(1)[0]
    renderer = load_renderer(built, enable_thinking=False)

    assert lesson.prompt_ids == renderer.prompt_ids(list(dialogue.messages), {})
    assert renderer.parse(lesson.answer_ids, lesson.prompt_ids, {}).content == dialogue.answer
    assert lesson.answer_ids[-1] in renderer.stop_token_ids
