"""Two versions asked again, each by an engine of its own: full weights, and an adapter above the base."""

from pathlib import Path

import pytest

from clawstream.config import EngineSettings, GatewaySettings, PolicySettings, Settings, TrainingSettings
from clawstream.errors import OperatorError
from clawstream.replay.past_requests import LocalVersion, PastRequest, asked, chosen, pairs
from clawstream.training.step.trainer import Trainer
from tests.parts.engine.tiny_model import make_model
from tests.parts.training import tiny

REQUESTS = [PastRequest(turn_id=f"t{i}", request="?", prompt_ids=tuple(range(40 + i, 60 + i))) for i in range(3)]


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_the_same_version_says_the_same_twice_and_one_that_learned_says_something_else(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    trainer = Trainer(base, TrainingSettings(learning_rate=1e-1, kl=0.0, lora_rank=4))
    trainer.update([tiny.sample(f"s{i}", reward=1) for i in range(4)], version=1, seed=0)
    (tmp_path / "v000001").mkdir()
    trainer.save(tmp_path / "v000001")
    settings = Settings(
        engine=EngineSettings(model_path=base),
        policy=PolicySettings(renderer="qwen3", enable_thinking=False),
        gateway=GatewaySettings(default_max_tokens=12),
    )
    wanted = [
        LocalVersion(number=0, path=base, adapter=False),
        LocalVersion(number=1, path=tmp_path / "v000001", adapter=True),
    ]
    told: list[None] = []

    async with asked(settings, base, wanted, tmp_path) as (old, new):
        alike = await pairs(old, old, REQUESTS, temperature=1.0, seed=3, tell=lambda: told.append(None))
        apart = await pairs(old, new, REQUESTS, temperature=1.0, seed=3, tell=lambda: None)
        again = await pairs(old, new, REQUESTS, temperature=1.0, seed=3, tell=lambda: None)

    assert len(told) == 3
    assert all(pair.is_same for pair in alike)
    assert not any(pair.is_same for pair in apart)
    assert again == apart, "equal seeds show the same"


def test_a_version_that_is_gone_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    found = {number: LocalVersion(number=number, path=tmp_path, adapter=False) for number in (0, 7)}
    assert chosen(found, None, default=7).number == 7
    with pytest.raises(OperatorError, match=r"version 3 is not on this machine's disk; there are 0, 7"):
        chosen(found, 3, default=7)
