"""A policy that a service trains: the numbers are the local trainer's, and nothing is lost where the service fails."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from clawstream.config import EngineSettings, Settings, TinkerSettings, TrainingSettings
from clawstream.errors import ConfigError, ServiceAway, StepRefused, UnusableCheckpoint
from clawstream.events import BatchPlanned, OfferedHint, RollbackAsked, SampleAssembled, StepRejected, StepTaken
from clawstream.inference.tinker_service import TinkerService, snapshot_in
from clawstream.stream import topics
from clawstream.training.base_folder import limits_of
from clawstream.training.batches.planning import turn_of
from clawstream.training.checkpoints import Checkpoint, latest, read
from clawstream.training.loop import train
from clawstream.training.step.losses import Suffix
from clawstream.training.step.trainer import Trainer
from clawstream.training.stepping import Stepper
from clawstream.training.tinker import TinkerTrainer
from tests.fakes import tinker_sdk
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.fakes.tinker_sdk import APIConnectionError, APIStatusError, FakeTinker
from tests.parts.training import tiny
from tests.parts.training.test_loop import said, trained_until

SAMPLES = [
    tiny.sample(f"s{i}", reward=(1, -1, None)[i % 3], hinted=i % 3 == 2 or i % 2 == 0, response_tokens=3 + i)
    for i in range(6)
]
SUFFIX = Suffix(SAMPLES[0].prompt_ids, SAMPLES[0].response_ids, 1.0)
TINKER = TrainingSettings(trainer="tinker", learning_rate=1e-3, gate=False, rehearsal_share=0)


@pytest.fixture
def fake(base: Path) -> Iterator[FakeTinker]:
    with tinker_sdk.in_place_of_the_sdk(base) as service:
        yield service


def service(base: Path) -> TinkerService:
    own = TinkerSettings(url="http://127.0.0.1:1")
    return TinkerService(Settings(environment=False, engine=EngineSettings(model_path=base), tinker=own))


def both(base: Path, **changes: object) -> tuple[TinkerTrainer, Trainer]:
    """The service's trainer and the local one, under the same settings."""
    chosen = TrainingSettings(**(TINKER.model_dump(exclude_unset=True) | changes))
    here = chosen.resolved.model_copy(update={"trainer": "torch"})
    return TinkerTrainer(base, chosen, service(base)), Trainer(base, here)


def scores(trainer: Trainer) -> list[float]:
    suffixes = [Suffix(s.prompt_ids, s.response_ids, s.temperature) for s in SAMPLES]
    return [v for row in trainer._model.score(suffixes, weights=None, budget_tokens=4096) for v in row.tolist()]


@pytest.mark.parametrize("changes", [
    {"method": "binary"}, {"method": "opd"}, {}, {"kl": 0.3, "epochs": 3}, {"teacher": "contrast"},
    {"loss": "cispo", "epochs": 2},
])  # fmt: skip
@pytest.mark.usefixtures("fake")
def test_a_service_moves_the_policy_as_the_local_trainer_does(base: Path, changes: dict[str, object]) -> None:
    there, here = both(base, **changes)
    assert scores(there) == pytest.approx(scores(here), abs=1e-5)
    for version in (1, 2):
        far = there.update(SAMPLES, version=version, seed=version)
        near = here.update(SAMPLES, version=version, seed=version)
        assert (far.num_samples, far.num_hinted, far.num_rewarded) == (6, near.num_hinted, near.num_rewarded)
        assert far.loss.loss_nats == pytest.approx(near.loss.loss_nats, abs=1e-4)
        assert far.loss.kl_reference_nats == pytest.approx(near.loss.kl_reference_nats, abs=1e-5)
        assert far.mean_gap_nats == (
            None if near.mean_gap_nats is None else pytest.approx(near.mean_gap_nats, abs=1e-4)
        )
        assert far.grad_norm == pytest.approx(near.grad_norm, rel=1e-3)
        assert far.loss.entropy_nats is None, "the service does not tell it"
        assert scores(there) == pytest.approx(scores(here), abs=1e-4)


@pytest.mark.usefixtures("fake")
def test_an_answer_at_another_temperature_has_no_importance_weight(base: Path) -> None:
    """Its log-probs are at 1 there, and of the sampling temperature on the log."""
    warm = [replace(s, temperature=0.5) for s in SAMPLES]
    strange = [replace(s, response_logprobs=tuple(-0.1 for _ in s.response_ids)) for s in warm]
    figures = []
    for samples in (warm, strange):
        trainer, _ = both(base, method="binary")
        trainer.update(samples, version=1, seed=1)
        figures.append(scores(trainer))
    assert figures[0] == figures[1]
    trainer, _ = both(base, method="binary")
    trainer.update([replace(s, temperature=1.0) for s in strange], version=1, seed=1)
    assert scores(trainer) != figures[0]


def plan(version: int, samples: list[SampleAssembled], chosen: TrainingSettings, parent: int = 0) -> BatchPlanned:
    return BatchPlanned(
        policy_id="policy", policy_version=version, parent_version=parent,
        sample_ids=tuple(s.sample_id for s in samples), offsets=(), seed=version,
        settings=chosen.resolved.model_dump_json().encode(), planned_at_ms=0, turns=tuple(map(turn_of, samples)),
    )  # fmt: skip


def stepper(base: Path) -> Stepper:
    return Stepper(base, limits_of(base), service=service(base))


def step(of: Stepper, one: BatchPlanned, root: Path, parent: Path | None = None) -> Path:
    found = of.execute(one, tuple(SAMPLES), parent=parent, versions=root, recorded=None)
    assert isinstance(found, Checkpoint)
    of.keep(found)
    return found.path


def trainer_of(one: Stepper) -> TinkerTrainer:
    assert one._trainer is not None
    trainer = one._trainer[2]
    assert isinstance(trainer, TinkerTrainer)
    return trainer


@pytest.mark.usefixtures("fake")
def test_a_new_process_goes_on_with_the_service_s_weights_and_moments(base: Path, tmp_path: Path) -> None:
    alone = stepper(base)
    first = step(alone, plan(1, SAMPLES, TINKER), tmp_path / "a")
    step(alone, plan(2, SAMPLES, TINKER, parent=1), tmp_path / "a", first)
    resumed = stepper(base)
    again = step(resumed, plan(2, SAMPLES, TINKER, parent=1), tmp_path / "b", first)
    assert scores(trainer_of(resumed)) == scores(trainer_of(alone))
    newest = latest(tmp_path / "a")
    assert newest is not None
    assert newest.version == 2
    assert newest.is_adapter
    assert again.name == "v000002"


def test_a_version_without_state_is_settled_on_what_engines_serve(base: Path, tmp_path: Path, fake: FakeTinker) -> None:
    """Killed between weights and state: the step is taken again, and training goes on from what is served."""
    found = stepper(base).execute(
        plan(1, SAMPLES, TINKER), tuple(SAMPLES), parent=None, versions=tmp_path, recorded=None
    )
    assert isinstance(found, Checkpoint)
    _, served, _ = fake.saved[snapshot_in(found.path)]
    fake.drift = 1e-3
    after = stepper(base)
    step(after, plan(1, SAMPLES, TINKER), tmp_path)
    now = trainer_of(after)._model.client.model.copy()
    assert all(served[name].equal(value) for name, value in now.items())


@pytest.mark.parametrize("failure", [APIConnectionError("refused"), APIStatusError("no money", 402)])
def test_a_service_that_is_away_costs_no_step(base: Path, tmp_path: Path, fake: FakeTinker, failure: Exception) -> None:
    of, reference = stepper(base), stepper(base)
    step(of, plan(1, SAMPLES, TINKER), tmp_path / "a")
    fake.fails = failure
    with pytest.raises(ServiceAway, match=r"127\.0\.0\.1:1"):
        step(of, plan(2, SAMPLES, TINKER, parent=1), tmp_path / "a", tmp_path / "a/v000001")
    fake.fails = None
    step(of, plan(2, SAMPLES, TINKER, parent=1), tmp_path / "a", tmp_path / "a/v000001")
    step(reference, plan(1, SAMPLES, TINKER), tmp_path / "b")
    step(reference, plan(2, SAMPLES, TINKER, parent=1), tmp_path / "b", tmp_path / "b/v000001")
    assert scores(trainer_of(of)) == scores(trainer_of(reference))


def test_hints_are_chosen_once_the_service_is_back(base: Path, tmp_path: Path, fake: FakeTinker) -> None:
    """The SDK's client is of no use after a request that failed: a new one goes on from the parent's state."""
    chosen = TINKER.model_copy(update={"hint_choice": "fall"})
    first = step(of := stepper(base), plan(1, SAMPLES, TINKER), tmp_path)
    offers = [
        replace(s, other_hints=(OfferedHint(hint="briefly", hinted_prompt_ids=(*s.prompt_ids, 7, 8)),))
        for s in SAMPLES
        if s.hinted_prompt_ids is not None
    ]
    one = plan(2, offers, chosen, parent=1)
    of.choose(one, tuple(offers), parent=first, recorded=False)
    fake.fails = APIConnectionError("refused")
    with pytest.raises(ServiceAway):
        of.choose(one, tuple(offers), parent=first, recorded=False)
    fake.fails, fake.started = None, fake.started + 1
    found = of.choose(one, tuple(offers), parent=first, recorded=False)
    assert [s.other_hints for s in found] == [()] * len(offers)


def test_a_wrong_key_is_said_and_a_state_that_is_gone_too(base: Path, tmp_path: Path, fake: FakeTinker) -> None:
    folder = step(stepper(base), plan(1, SAMPLES, TINKER), tmp_path)
    fake.saved.clear()
    with pytest.raises(UnusableCheckpoint, match=r"does not have it any more.*rollback"):
        step(stepper(base), plan(2, SAMPLES, TINKER, parent=1), tmp_path, folder)
    fake.fails = APIStatusError("who are you", 401)
    with pytest.raises(ConfigError, match=r"401.*tinker\.api_key"):
        step(stepper(base), plan(3, SAMPLES, TINKER), tmp_path)


def test_too_few_log_probs_are_refused_and_change_nothing(base: Path, fake: FakeTinker) -> None:
    trainer, _ = both(base)
    fake.forget_values = 2
    with pytest.raises(ServiceAway, match=r"log-probs for \d+ tokens"):
        trainer.update(SAMPLES, version=1, seed=1)
    assert "optim_step" not in fake.calls


@pytest.mark.usefixtures("fake")
def test_a_step_that_goes_too_far_is_refused_by_the_gate(base: Path) -> None:
    trainer, _ = both(base, gate=True, learning_rate=0.3)
    with pytest.raises(StepRefused, match="moved by"):
        trainer.update(SAMPLES, version=1, seed=1, gated=True)
    careful, _ = both(base, gate=True, learning_rate=1e-5)
    careful.update(SAMPLES, version=1, seed=1, gated=True)


def test_each_version_is_a_snapshot_of_its_own_weights(base: Path, tmp_path: Path, fake: FakeTinker) -> None:
    of = stepper(base)
    first = step(of, plan(1, SAMPLES, TINKER), tmp_path)
    second = step(of, plan(2, SAMPLES, TINKER, parent=1), tmp_path, first)
    now = trainer_of(of)._model.client.model.copy()
    served = [fake.saved[snapshot_in(folder)][1] for folder in (first, second)]
    assert all(served[1][name].equal(value) for name, value in now.items())
    assert not all(served[0][name].equal(value) for name, value in now.items())


@pytest.mark.usefixtures("fake")
def test_a_trainer_that_goes_back_forgets_what_other_weights_scored(base: Path) -> None:
    trainer, _ = both(base)
    before = scores(trainer)
    trainer.update(SAMPLES, version=1, seed=1)
    assert scores(trainer) != before
    trainer.restore(None)
    assert scores(trainer) == before


@pytest.mark.usefixtures("fake")
def test_gradients_that_are_forgotten_take_no_part_in_a_step(base: Path) -> None:
    disturbed, alone = both(base)[0], both(base)[0]
    model = disturbed._model
    model.accumulate([[0]], [SUFFIX], lambda _: model.token_scores([SUFFIX]).logp_BT.nansum())
    disturbed._forget_gradients()
    for trainer in (disturbed, alone):
        trainer.update(SAMPLES, version=1, seed=1)
    assert scores(disturbed) == scores(alone)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.usefixtures("fake")
def test_a_token_without_a_log_prob_is_not_trained_at_any_temperature(base: Path, temperature: float) -> None:
    trainer, _ = both(base, method="binary")
    nothing = [replace(s, temperature=temperature, response_logprobs=(None,) * len(s.response_ids)) for s in SAMPLES]
    found = trainer.update(nothing, version=1, seed=1)
    assert found.loss.num_tokens == 0


def test_a_step_that_asks_for_nothing_sends_nothing(base: Path, fake: FakeTinker) -> None:
    trainer, _ = both(base, method="binary", kl=0)
    found = trainer.update(SAMPLES, version=1, seed=1, advantages=[0.0] * len(SAMPLES))
    assert found.grad_norm == 0.0
    assert "optim_step" not in fake.calls


async def test_a_request_that_the_service_refuses_for_good_refuses_the_step_alone(
    base: Path, tmp_path: Path, fake: FakeTinker
) -> None:
    log, chosen = MemoryLog(MemoryBroker()), served_by_a_service(base, tmp_path)
    await log.append(SAMPLES[:3])
    await trained_until(log, chosen, 1)
    fake.refuses = [APIStatusError("the prompt is longer than 32768 tokens", 400)]
    await log.append(SAMPLES[3:])
    await log.append([tiny.sample(f"more{i}") for i in range(3)])
    events = await trained_until(log, chosen, 3)
    (rejected,) = [event for event in events if isinstance(event, StepRejected)]
    assert (rejected.policy_version, "32768 tokens" in rejected.reason) == (2, True)


@pytest.mark.usefixtures("fake")
def test_a_version_of_another_base_or_trainer_is_not_gone_on_from(base: Path, tmp_path: Path) -> None:
    folder = step(stepper(base), plan(1, SAMPLES, TINKER), tmp_path)
    own = TinkerSettings(url="http://127.0.0.1:1", model="Another/Base")
    other = TinkerService(Settings(environment=False, engine=EngineSettings(model_path=base), tinker=own))
    with pytest.raises(UnusableCheckpoint, match=r"the base is Another/Base now.*tinker\.model"):
        TinkerTrainer(base, TINKER, other).restore(folder)
    here = TINKER.resolved.model_copy(update={"trainer": "torch"})
    with pytest.raises(UnusableCheckpoint, match=r"a service has this version.*training\.trainer"):
        Trainer(base, here).restore(folder)


def test_what_the_gate_writes_is_the_service_s_answer(base: Path, fake: FakeTinker) -> None:
    trainer, _ = both(base)
    questions = [Suffix(s.prompt_ids, s.response_ids, t) for s, t in zip(SAMPLES, (1.0, 0.5), strict=False)]
    written = trainer._writes(trainer._model, questions, limit_tokens=5, seed=3, budget_tokens=64)
    assert {asked.temperature for asked in fake.sampled} == {0.5, 1.0}
    assert [len(one.token_ids) for one in written] == [5, 5]
    assert trainer._writes(trainer._model, questions, limit_tokens=5, seed=3, budget_tokens=64) == written


def served_by_a_service(base: Path, data: Path) -> Settings:
    return Settings(
        environment=False, data_dir=data, engine=EngineSettings(model_path=base),
        tinker=TinkerSettings(url="http://127.0.0.1:1"), training=TINKER.model_copy(update={"batch_samples": 3}),
    )  # fmt: skip


async def test_training_goes_on_once_the_service_is_back(
    base: Path, tmp_path: Path, fake: FakeTinker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("clawstream.training.policy_loop.ASKED_AGAIN_S", 0.3)
    log = MemoryLog(MemoryBroker())
    await log.append(SAMPLES[:3])
    chosen = served_by_a_service(base, tmp_path)
    fake.fails = APIConnectionError("refused")
    stop = asyncio.Event()
    running = asyncio.create_task(train(chosen, log, stop=stop))
    async with asyncio.timeout(60):
        while "state=waits" not in caplog.text:
            assert not running.done(), running
            await asyncio.sleep(0.01)
        await log.append(SAMPLES[3:4])  # what arrives meanwhile hurries nobody
        while len(waits := [told for told in caplog.records if "state=waits" in told.getMessage()]) < 2:
            assert not running.done(), running
            await asyncio.sleep(0.01)
        assert waits[1].created - waits[0].created > 0.25, "not asked again before its time"
        assert not any(isinstance(event, StepTaken) for event in await said(log))
        fake.fails = None
        async for records in log.follow([topics.POLICY], "earliest"):
            if any("PolicyPublished" in repr(r) and "policy_version=1" in repr(r) for r in records):
                break
        stop.set()
        await running
    (taken,) = [event for event in await said(log) if isinstance(event, StepTaken)]
    assert taken.num_samples == 3
    assert read(tmp_path / "policies/policy/v000001").is_adapter


async def test_a_rollback_leads_away_from_a_version_that_the_service_has_no_more(
    base: Path, tmp_path: Path, fake: FakeTinker
) -> None:
    log, chosen = MemoryLog(MemoryBroker()), served_by_a_service(base, tmp_path)
    await log.append(SAMPLES[:3])
    await trained_until(log, chosen, 1)
    fake.saved.clear()
    await log.append(SAMPLES[3:])
    for _ in range(2):
        with pytest.raises(UnusableCheckpoint, match="rollback"):
            async with asyncio.timeout(60):
                await train(chosen, log, stop=asyncio.Event())
    await log.append([RollbackAsked(policy_id="policy", number=1, to_version=0, asked_at_ms=0)])
    events = await trained_until(log, chosen, 3)
    (rejected,) = [event for event in events if isinstance(event, StepRejected)]
    assert (rejected.policy_version, "does not have it any more" in rejected.reason) == (2, True)
    plans = [event for event in events if isinstance(event, BatchPlanned)]
    assert (plans[-1].policy_version, plans[-1].parent_version, plans[-1].rollback) == (3, 0, 1)


@pytest.mark.parametrize("changes", [
    {"method": "topk"}, {"w_topk": 0.5}, {"hint_choice": "overlap"}, {"processes": 2},
])  # fmt: skip
def test_what_a_service_can_t_do_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="the service trains"):
        TrainingSettings(**({"trainer": "tinker"} | changes))


def test_a_service_trains_an_adapter_of_rank_32_by_gaps() -> None:
    chosen = TrainingSettings(trainer="tinker")
    assert (chosen.lora_rank, chosen.learning_rate, chosen.taught_by) == (32, 1e-4, "reference")
    assert TrainingSettings.model_validate_json(chosen.resolved.model_dump_json()) == chosen.resolved


def test_the_hosted_service_asks_for_a_key(base: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeTinker) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    nothing = Settings(environment=False, engine=EngineSettings(model_path=base))
    with pytest.raises(ConfigError, match="TINKER_API_KEY"):
        TinkerService(nothing)
    monkeypatch.setenv("TINKER_API_KEY", "tml-1")
    assert TinkerService(nothing).base_model == str(base)
    assert fake.calls == []


def test_without_the_sdk_the_extra_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)  # as where it is not installed
    with pytest.raises(ConfigError, match="--extra tinker"):
        service(base)
