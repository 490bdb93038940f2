"""A version that the trainer published: an engine that took it over says of an answer what the trainer says."""

from pathlib import Path

import pytest

from clawstream.config import TrainingSettings
from clawstream.training.step.losses import Suffix
from clawstream.training.step.trainer import Trainer
from tests.parts.engine.conftest import ON_VLLM, Subject
from tests.parts.training import tiny

pytestmark = pytest.mark.slow

PROMPT, ANSWER = tuple(range(40, 60)), tuple(range(70, 90))
SAMPLES = [tiny.sample(f"s{i}", reward=1 if i % 2 else -1) for i in range(4)]


def published(trainer: Trainer, folder: Path) -> str:
    trainer.update(SAMPLES, version=1, seed=0)
    folder.mkdir()
    trainer.save(folder)
    return str(folder)


def says(trainer: Trainer) -> list[float]:
    """What the trainer's own code says of each token of the answer."""
    (logp_T,) = trainer._model.score([Suffix(PROMPT, ANSWER, 1.0)], weights=None, budget_tokens=4096)
    return [float(value) for value in logp_T]


@pytest.mark.parametrize("lora_rank", [None, 4], ids=["all weights", "adapter"])
@pytest.mark.parametrize("subject", ["cpu", pytest.param("vllm", marks=ON_VLLM)], indirect=True)
async def test_a_published_version_changes_the_engines_logprobs_by_what_the_trainer_says(
    subject: Subject, tmp_path: Path, lora_rank: int | None
) -> None:
    trainer = Trainer(subject.model, TrainingSettings(learning_rate=1e-2, kl=0.0, lora_rank=lora_rank))
    engine = subject.engine
    trainer_before, engine_before = says(trainer), await engine.score(PROMPT + ANSWER, len(PROMPT))
    path = published(trainer, tmp_path / "v000001")
    if lora_rank is None:
        await engine.update_weights(path, "101")
        engine_after = await engine.score(PROMPT + ANSWER, len(PROMPT), extra_key="after")
        await engine.update_weights(str(subject.model), "1", flush_cache=True)
    else:
        await engine.load_lora_adapter("policy-v1", path)
        engine_after = await engine.score(PROMPT + ANSWER, len(PROMPT), lora_name="policy-v1")
        await engine.unload_lora_adapter("policy-v1")

    by_trainer = [after - before for after, before in zip(says(trainer), trainer_before, strict=True)]
    by_engine = [after - before for after, before in zip(engine_after, engine_before, strict=True)]
    assert max(map(abs, by_trainer)) > 0.05
    assert by_engine == pytest.approx(by_trainer, abs=1e-3)
