"""Run in a process that finds the Tinker SDK: what a service's trainer does, as one line of JSON."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from clawstream.config import EngineSettings, Settings, TinkerSettings, TrainingSettings
from clawstream.inference.dialect import Call
from clawstream.inference.engine import GenerateRequest, SamplingParams
from clawstream.inference.tinker_service import TinkerService
from clawstream.local.engine.tinker import TinkerBackend
from clawstream.training.step.losses import Suffix
from clawstream.training.tinker import TinkerTrainer
from tests.parts.training import tiny

SAMPLES = [tiny.sample("up", reward=1), tiny.sample("down", reward=-1)]
SUFFIXES = [Suffix(s.prompt_ids, s.response_ids, 1.0) for s in SAMPLES]
TRAINING = TrainingSettings(trainer="tinker", learning_rate=1e-3, gate=False, rehearsal_share=0, method="binary")


def scores(trainer: TinkerTrainer) -> list[list[float]]:
    return [row.tolist() for row in trainer._model.score(SUFFIXES, weights=None, budget_tokens=1)]


def apart(one: list[list[float]], other: list[list[float]]) -> float:
    return max(abs(a - b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True))


async def sampled(service: TinkerService, base: Path, folder: Path) -> list[list[float]]:
    """An answer by the version in the folder: what the engine says of its tokens, and what scoring says."""
    backend = TinkerBackend(service, base, ends=(), decode=None)
    assert (await backend.load_lora("policy-v1", str(folder))).success
    request = GenerateRequest(
        input_ids=SAMPLES[0].prompt_ids, sampling=SamplingParams(max_new_tokens=6, temperature=1.0, sampling_seed=3),
        lora_name="policy-v1",
    )  # fmt: skip
    answer = await (await backend.start(Call(rid="a", request=request))).next()
    ids = [*SAMPLES[0].prompt_ids, *answer.token_ids]
    scored = await (await backend.start(Call(
        rid="b", logprob_start=len(SAMPLES[0].prompt_ids) - 1,
        request=GenerateRequest(
            input_ids=ids, sampling=SamplingParams(max_new_tokens=0, temperature=0.0), lora_name="policy-v1"
        ),
    ))).next()  # fmt: skip
    told = [value for value in answer.logprobs if value is not None]
    assert len(told) == len(answer.token_ids)
    return [told, [value for value, _, _ in scored.input_logprobs if value is not None]]


def main(base: Path, url: str) -> None:
    """Print what was found."""
    settings = Settings(environment=False, engine=EngineSettings(model_path=base), tinker=TinkerSettings(url=url))
    service = TinkerService(settings)
    trainer = TinkerTrainer(base, TRAINING, service)
    before, by_base = scores(trainer), trainer._model.score(SUFFIXES, weights={}, budget_tokens=1)
    update = trainer.update(SAMPLES, version=1, seed=1)
    after = scores(trainer)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "v000001"
        (folder / "trainer").mkdir(parents=True)
        trainer.save(folder)
        trainer.save_state(folder / "trainer")
        resumed = TinkerTrainer(base, TRAINING, service)
        resumed.restore(folder)
        back = scores(resumed)
        told, scored = asyncio.run(sampled(service, base, folder))
    for one in (trainer, resumed):
        one.update(SAMPLES, version=2, seed=2)
    found = {
        "up": sum(after[0]) - sum(before[0]),
        "down": sum(after[1]) - sum(before[1]),
        "resumed_nats": apart(back, after),
        "next_step_nats": apart(scores(trainer), scores(resumed)),
        "sampled_nats": apart([told], [scored]),
        "base_nats": apart(before, [row.tolist() for row in by_base]),
        "grad_norm": update.grad_norm,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
