"""A published checkpoint is scored by a real engine and a real gateway of its own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clawstream.config import Settings, TrainingSettings
from clawstream.simulation.learn.scoring import room
from clawstream.simulation.runs.people import people_of
from clawstream.training.step.trainer import Trainer
from tests.parts.engine.tiny_model import make_model

pytestmark = pytest.mark.slow


@pytest.mark.timeout(180)
async def test_a_checkpoint_is_scored_in_a_fresh_engine_under_its_own_version(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    people = people_of("student", tmp_path)
    few = tmp_path / "few.jsonl"
    few.write_text("".join(people.scored.read_text().splitlines(keepends=True)[:3]))

    async with room(tmp_path / "room", replace(people, scored=few), Settings(environment=False).cache_dir) as asking:
        score = await asking.score(model, 7, base=model)

        learned = await asking.score(_adapter(model, tmp_path / "adapter"), 8, base=model)

    assert (learned.update, learned.num_problems) == (8, 3)
    assert (score.update, score.num_problems, score.score) == (7, 3, 0.0)  # random weights add no numbers
    written = (tmp_path / "room" / "settings.json").read_text()
    settings = json.loads(written)
    assert settings["engine"]["model_path"] == str(model)


def _adapter(model: Path, folder: Path) -> Path:
    folder.mkdir()
    Trainer(model, TrainingSettings(lora_rank=2)).save(folder)
    return folder
