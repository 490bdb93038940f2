"""An engine as the teacher: the trainer weighs hints by its scores alone, and learns what it would by its own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from clawstream.config import TeacherSettings, TrainingSettings
from clawstream.events import (
    Event,
    ExchangeCompleted,
    HintFound,
    SampleAssembled,
    Sampling,
    TurnPaired,
    VerdictReached,
    float32,
)
from clawstream.inference.clients import engine_session
from clawstream.inference.judge_client import TeacherClient
from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.server_process import reserved
from clawstream.samples.joining import SampleRules, TeacherRule
from clawstream.samples.stage import asking_stage, samples_stage
from clawstream.training.batches.choosing import Arrival
from clawstream.training.batches.choosing import BatchRules as BatchRules
from clawstream.training.batches.planning import Batcher, DropReason
from clawstream.training.batches.trainable import ModelLimits, flaw
from clawstream.training.step.trainer import StepSummary, Trainer
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.flow import Flow
from tests.parts.engine.process import cpu_engine
from tests.parts.engine.tiny_model import make_model
from tests.parts.training import tiny
from tests.parts.training.step.test_methods import gradient_of
from tests.parts.training.step.test_trainer import MIXED, on_policy, scored, with_settings
from tests.sessions import SAMPLES, Letters
from tests.unit.samples.test_teacher import judge, one_turn
from tests.unit.stream import toys

BY_ENGINE = with_settings(teacher="http://teacher")


def taught(trainer: Trainer, samples: list[SampleAssembled], *, louder: float = 0.0) -> list[SampleAssembled]:
    """The samples with both scores as an engine on the current weights gives them, all of them higher by `louder`."""

    def row(s: SampleAssembled, *, hinted: bool) -> tuple[float | None, ...]:
        return float32((scored(trainer, s, hinted=hinted) + louder).tolist())

    return [
        s
        if s.hinted_prompt_ids is None
        else replace(
            s,
            teacher="t",
            teacher_logprobs=row(s, hinted=True),
            student_logprobs=row(s, hinted=False),
            student_version=0,
        )
        for s in samples
    ]


def step(
    base: Path, settings: TrainingSettings, *, louder: float = 0.0, gated: bool = False
) -> tuple[StepSummary, torch.Tensor]:
    trainer = Trainer(base, settings)
    samples = taught(trainer, on_policy(trainer, MIXED), louder=louder)
    return trainer.update(samples, version=1, seed=0, gated=gated), gradient_of(trainer)


@pytest.mark.parametrize("method", ["opd", "combined"])
def test_scores_of_the_same_weights_give_the_step_that_the_trainer_s_own_give(base: Path, method: str) -> None:
    own, by_own = step(base, with_settings(method=method, w_topk=0))
    update, by_engine = step(base, with_settings(method=method, teacher="http://teacher"))
    assert update.mean_gap_nats == pytest.approx(own.mean_gap_nats, abs=1e-5)
    assert (update.num_hinted, update.loss.num_tokens) == (own.num_hinted, own.loss.num_tokens)
    torch.testing.assert_close(by_engine, by_own, atol=1e-5, rtol=1e-4)


def test_an_engine_s_score_is_never_held_against_the_trainer_s(base: Path) -> None:
    """Whatever an engine's arithmetic adds to both sides of a gap, the step is the same."""
    update, gradient = step(base, BY_ENGINE)
    louder, gradient_of_louder = step(base, BY_ENGINE, louder=-3.0)
    assert louder.mean_gap_nats == pytest.approx(update.mean_gap_nats, abs=1e-5)
    torch.testing.assert_close(gradient_of_louder, gradient, atol=1e-5, rtol=1e-4)


def test_nor_does_the_gate_hold_it_against_them(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[object] = []
    monkeypatch.setattr("clawstream.training.gating.astray", lambda _b, _a, _h, wanted: ways.append(wanted))
    for louder in (0.0, -3.0):
        step(base, BY_ENGINE, louder=louder, gated=True)
    for one, other in zip(*ways, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_hint_without_scores_counts_nothing_where_an_engine_is_the_teacher(base: Path) -> None:
    trainer = Trainer(base, BY_ENGINE)
    update = trainer.update(on_policy(trainer, [tiny.sample("a", reward=None, hinted=True)]), version=1, seed=0)
    assert (update.num_hinted, update.loss.num_tokens, update.grad_norm) == (0, 0, None)


@pytest.mark.parametrize("by_engine", [True, False])
def test_a_sample_of_a_hint_without_scores_is_no_batch_s_where_an_engine_is_the_teacher(*, by_engine: bool) -> None:
    batcher = Batcher(BatchRules(policy_id="policy", by_engine=by_engine))
    sample = tiny.sample("a", reward=None, hinted=True)
    arrival = Arrival(topic=SAMPLES, partition=0, offset=0, timestamp_ms=0, sample=sample)
    assert batcher.receive(arrival) == (DropReason.NO_SIGNAL if by_engine else None)


def test_scores_that_do_not_fit_the_answer_are_a_flaw() -> None:
    sample = tiny.sample("a", hinted=True, response_tokens=3)
    right = replace(sample, teacher_logprobs=(-1.0,) * 3, student_logprobs=(-1.0,) * 3)
    assert flaw(right, ModelLimits()) is None
    assert "teacher_logprobs has 2 values: expected 3" in str(
        flaw(replace(right, teacher_logprobs=(-1.0,) * 2), ModelLimits())
    )
    assert "expected both, to compare them, or neither" in str(
        flaw(replace(right, student_logprobs=None), ModelLimits())
    )


@pytest.mark.parametrize(
    "changes", [{"method": "topk"}, {"w_topk": 0.5}, {"rehearsal_share": 0.1}, {"cadence": "correction"}], ids=str
)
def test_what_an_engine_can_not_be_the_teacher_of_is_refused_at_start(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=f"{next(iter(changes))}.* need the trainer as teacher"):
        with_settings(teacher="http://teacher", **changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("served") / "model", seed=3)


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """A CPU engine that serves the model as version 3, which sampled the answers."""
    with reserved() as port, cpu_engine(model, port, "--weight-version", "3") as address:
        yield address


@pytest.mark.slow
async def test_from_a_hint_to_a_step_an_engine_with_the_policy_s_weights_teaches_what_the_trainer_would(
    model: Path, url: str
) -> None:
    whole = Sampling(temperature=1.0, top_p=1.0, top_k=None, max_tokens=64, seed=None, stop=())
    events = [replace(event, sampling=whole) for event in one_turn().written]  # type: ignore[call-arg]
    said = Flow(judge(-1)).run(events).of(Event)
    log = MemoryLog(MemoryBroker(partitions=1))
    await log.append([e for e in said if isinstance(e, ExchangeCompleted | TurnPaired | VerdictReached | HintFound)])
    stage = samples_stage(SampleRules(Letters(), asks=TeacherRule("t@engine")))
    async with engine_session(TeacherSettings()) as session:
        engine = SglangEngine(session, url)
        asking = asking_stage(stage, TeacherClient(engine, [engine], policy_id="policy"))
        async with toys.running(asking, log):
            await toys.settled(log, "samples")
    [sample] = [r.event for r in await toys.read(log, SAMPLES) if isinstance(r.event, SampleAssembled)]
    assert (sample.teacher, sample.student_version) == ("t@engine", 3)

    updates, gradients = [], []
    for settings in (with_settings(w_topk=0), BY_ENGINE):
        trainer = Trainer(model, settings)
        updates.append(trainer.update([sample], version=1, seed=0))
        gradients.append(gradient_of(trainer))
    own, by_engine = updates
    assert own.mean_gap_nats is not None
    assert abs(own.mean_gap_nats) > 1e-3, "the hint says something"
    assert by_engine.mean_gap_nats == pytest.approx(own.mean_gap_nats, abs=1e-3)
    assert by_engine.loss.loss_nats == pytest.approx(own.loss.loss_nats, abs=1e-3)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-3, rtol=1e-2)
