"""How often the gate rejects healthy steps of the demonstration's policy, and whether it catches what is planted.

One process and no servers: students ask the policy, its answers are sampled by the trainer's own weights, and three
votes of which each is wrong with 10 % judge them, as in `clawstream demo`. Faults are planted in copies of a trainer
that has learned for a while; a fault is caught where one of the `PATIENCE` (or `LONG_RUN`) steps from then on is
rejected.
"""

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import platformdirs
import torch
import typer
from renderers import Qwen3RendererConfig

from clawstream.config import TrainingSettings
from clawstream.errors import GradientNotFinite, StepRefused
from clawstream.events import SampleAssembled, VersionSpan, float32
from clawstream.inference.rendering import PromptRenderer
from clawstream.simulation import policy, taste
from clawstream.simulation.dialogues import with_hint
from clawstream.simulation.opinions import HABITS, HINTS, Wish
from clawstream.simulation.problems import Group, Sum, all_of
from clawstream.simulation.recipe import RECIPES
from clawstream.simulation.tokenizer import END_OF_MESSAGE
from clawstream.simulation.tokenizer import build as tokenizer
from clawstream.training.answers import Suffix
from clawstream.training.torch_model import TorchModel
from clawstream.training.trainer import Trainer
from clawstream.training.writing import write
from tests.bench.report import report
from tests.training.planted import FAULTS, always_good

SETTINGS = TrainingSettings(learning_rate=2e-4, threads=1)
BATCH = 16
TEMPERATURE = 0.8
WRONG_SHARE = 0.1
LIMIT_TOKENS = 200
STEPS_A_RUN = 20  # of one policy; then another one begins anew
PLANTED_AFTER = (2, 5, 10)  # healthy steps
PATIENCE = 3  # steps within which a fault is to be caught
LONG_RUN = 10  # and within which a judge is that says yes to everything, whose rewards were good before


def gate(
    num_null: Annotated[int, typer.Option(help="healthy steps")] = 100,
    seed: Annotated[int, typer.Option(help="of the first run")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Count false rejections, and faults caught."""
    torch.set_num_threads(1)
    base = policy.ensure(Path(platformdirs.user_cache_dir("clawstream")), RECIPES["demo"])
    rejected: list[str] = []
    caught: dict[str, list[int | None]] = {name: [] for name in (*FAULTS, "always +1")}
    shares: list[float] = []
    steps = 0
    while steps < num_null:
        trainer, students = Trainer(base, SETTINGS), Students(seed)
        for version in range(1, min(STEPS_A_RUN, num_null - steps) + 1):
            samples = students.samples(trainer, version=version - 1)
            with tempfile.TemporaryDirectory() as kept:
                trainer.save(Path(kept))
                if version - 1 in PLANTED_AFTER:
                    for name, steps_until in caught.items():
                        steps_until.append(_until_caught(base, Path(kept), name, version, seed))
                try:
                    took_s = _timed(trainer, samples, version, gated=True)
                except StepRefused as why:
                    rejected.append(f"run {seed} version {version}: {why}")
                    trainer = _restored(base, Path(kept))
                else:
                    plain_s = _timed(_restored(base, Path(kept)), samples, version, gated=False)
                    shares.append(1 - plain_s / took_s)
            steps += 1
        seed += 1
    report(
        {
            "null_steps": num_null,
            "false_rejections": len(rejected),
            "false_rejections_why": rejected,
            "caught_within": {name: {"tried": len(found), "steps": found} for name, found in caught.items()},
            "gate_share_of_step": sorted(shares)[len(shares) // 2],
        },
        json_file,
    )


def _until_caught(base: Path, kept: Path, fault: str, version: int, seed: int) -> int | None:
    """Return at which step the fault was caught, from 1 on; None: it was not."""
    trainer, students = _restored(base, kept), Students(1000 + 100 * seed + version)
    for step in range(1, (LONG_RUN if fault == "always +1" else PATIENCE) + 1):
        samples = students.samples(trainer, version=version + step - 2)
        if fault == "always +1":
            samples = always_good(samples)
        elif step == 1:
            FAULTS[fault](trainer)
        try:
            trainer.update(samples, version=version + step - 1, seed=step, gated=True)
        except (StepRefused, GradientNotFinite):
            return step
    return None


def _timed(trainer: Trainer, samples: list[SampleAssembled], version: int, *, gated: bool) -> float:
    """Take the step; return the seconds of this thread that it took."""
    began_s = time.thread_time()
    trainer.update(samples, version=version, seed=version, gated=gated)
    return time.thread_time() - began_s


def _restored(base: Path, folder: Path) -> Trainer:
    trainer = Trainer(base, SETTINGS)
    trainer.restore(folder)
    return trainer


class Students:
    """Ask a policy, and say what they think of its answers."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._sums = all_of(Group.STUDENTS)
        self._words = tokenizer()
        self._renderer = PromptRenderer(self._words, Qwen3RendererConfig(enable_thinking=False))
        self._end = int(self._words.convert_tokens_to_ids(END_OF_MESSAGE))
        self._asked = 0

    def samples(self, trainer: Trainer, *, version: int, count: int = BATCH) -> list[SampleAssembled]:
        """Return what came of so many answers that ended; a neutral verdict without a hint is no sample."""
        found: list[SampleAssembled] = []
        while len(found) < count:
            found += self._ask(trainer, version)
        return found[:count]

    def _ask(self, trainer: Trainer, version: int) -> Iterator[SampleAssembled]:
        problems = self._rng.choices(self._sums, k=BATCH)
        said = [taste.ask(_task(p), self._rng) for p in problems]
        prompts = [self._prompt(text) for text in said]
        questions = [Suffix(prompt, (0,), TEMPERATURE) for prompt in prompts]
        assert isinstance(trainer._model, TorchModel)
        written = write(trainer._model, questions, limit_tokens=LIMIT_TOKENS, seed=self._rng.randrange(2**31))
        assert written is not None
        whole = [
            (text, Suffix(q.prompt_ids, (*a.token_ids, self._end), TEMPERATURE), p)
            for text, q, a, p in zip(said, questions, written, problems, strict=True)
            if a.ended and a.token_ids
        ]
        logps = trainer._model.score([s for _, s, _ in whole], weights=None, budget_tokens=16_384)
        for (text, suffix, problem), logp in zip(whole, logps, strict=True):
            answer = self._words.decode(suffix.response_ids[:-1])
            felt = taste.impression(_task(problem), answer)
            yield self._sample(text, suffix, felt, float32(logp.tolist()), version)

    def _sample(
        self, text: str, suffix: Suffix, felt: taste.Impression, logps: tuple[float | None, ...], version: int
    ) -> SampleAssembled:
        good = felt is taste.Impression.GOOD
        reward = 1 if self._majority(good) else -1
        hint, wrong = None, felt is taste.Impression.WRONG
        if self._majority(not good):
            hint = self._rng.choice(HABITS["student"].corrections if wrong else HINTS[Wish.PLAIN])
        self._asked += 1
        count = len(suffix.response_ids)
        return SampleAssembled(
            session_id=f"s{self._asked}",
            turn_id=f"t{self._asked}",
            judge="judge",
            prompt_version="1",
            revision=0,
            reward=reward,
            hint=hint,
            prompt_ids=tuple(suffix.prompt_ids),
            hinted_prompt_ids=None if hint is None else self._prompt(with_hint(text, hint)),
            response_ids=tuple(suffix.response_ids),
            response_logprobs=logps,
            trained=(1,) * count,
            temperature=TEMPERATURE,
            sampling=None,
            policy_id="policy",
            versions=(VersionSpan(policy_version=version, num_tokens=count),),
            num_earlier_turns=0,
            total_reward=float(reward) if reward is not None else None,
        )

    def _majority(self, truth: bool) -> bool:
        return sum(truth != (self._rng.random() < WRONG_SHARE) for _ in range(3)) >= 2

    def _prompt(self, text: str) -> tuple[int, ...]:
        return self._renderer.prompt_ids(({"role": "user", "content": text},), {})


def _task(problem: Sum) -> taste.Task:
    return taste.Task(persona="student", question=f"{problem.left} + {problem.right}", answer=str(problem.total))
