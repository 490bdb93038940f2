"""Whoever trains a batch takes the same step: one process, FSDP2, or Megatron-Core cut in any way."""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from math import inf
from pathlib import Path

import pytest
import torch

from clawstream.config import TrainingSettings
from clawstream.errors import PartUnavailable
from clawstream.events import BatchPlanned, SampleAssembled, StepRejected
from clawstream.inference.model_folder import STATE_FOLDER, weight_files
from clawstream.training.base_folder import limits_of, stored, tensors_of
from clawstream.training.batches.memory import Trial
from clawstream.training.checkpoints import Checkpoint
from clawstream.training.processes import Processes
from clawstream.training.step.trainer import StepSummary, Trainer
from clawstream.training.stepping import Stepper, Team
from tests.keeping import keep
from tests.parts.training import tiny
from tests.parts.training.parallel.conftest import Teams, forked_processes, two_processes
from tests.parts.training.step.test_hint_choice import offered

pytestmark = pytest.mark.timeout(300)  # the processes' first imports take half a minute on a busy machine

ADAPTER_FILE = "adapter_model.safetensors"
FSDP: dict[str, object] = {"processes": 2}
TENSOR = {"trainer": "megatron", "processes": 2, "tensor_parallel": 2}
PIPELINE = {"trainer": "megatron", "processes": 2, "pipeline_parallel": 2}
ADAPTER = {"lora_rank": 4}
DATA = {"trainer": "megatron", "processes": 2}
CUTS = [
    pytest.param(FSDP, id="fsdp"),
    pytest.param(TENSOR, id="tensor"),
    pytest.param(PIPELINE, id="pipeline"),
    pytest.param(DATA, id="data"),
]
METHODS: list[dict[str, object]] = [
    {"method": "combined"},
    {"method": "binary"},
    {"method": "opd"},
    {"method": "topk"},
    {"method": "stepwise"},
    {"method": "combined", "epochs": 2},
    {"method": "combined", "w_topk": 0.5},
    {"method": "combined", "hint_choice": "overlap", "epochs": 2},
    {"method": "combined", "hint_choice": "overlap", "w_topk": 0.5},  # beside a contrast
    {"method": "combined", "loss": "cispo", "epochs": 2},  # losses differ where a batch has several steps
    {"method": "binary", "loss": "importance_sampling", "epochs": 2},
]
MIXED = [
    tiny.sample(
        f"s{i}", reward=(1, -1, None)[i % 3], hinted=i % 3 == 2 or i % 2 == 0, prompt_tokens=3 + 2 * i,
        response_tokens=3 + i, temperature=(1.0, 0.8)[i % 2],
    )
    for i in range(7)
]  # fmt: skip


def settings_of(changes: dict[str, object]) -> TrainingSettings:
    return TrainingSettings(learning_rate=1e-3, micro_batch_tokens=64, **changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """What engines are given: a model, or an adapter."""
    adapter = folder / ADAPTER_FILE
    return {name: read() for name, read in tensors_of([adapter] if adapter.exists() else weight_files(folder))}


def state(folder: Path) -> dict[str, torch.Tensor]:
    """What a trainer goes on from, beside those."""
    stems = ("optimizer", "masters")
    return {f"{stem}/{name}": read() for stem in stems for name, read in stored(folder / STATE_FOLDER, stem)}


def step(
    trainer: Trainer | Team, folder: Path, samples: list[SampleAssembled], version: int, *, method: object = None
) -> StepSummary:
    advantages = [number - 2.5 for number in range(len(samples))] if method == "stepwise" else None
    hinted = [(sample.sample_id, sample.hinted_prompt_ids) for sample in samples]
    trials = [
        Trial(hint_id="h", sample_id=name, hinted_prompt_ids=ids, accepted=True, least_gain_nats=-inf)
        for name, ids in hinted
        if ids is not None
    ]
    update = trainer.update(samples, version=version, seed=version, advantages=advantages, trials=trials)
    keep(trainer, folder)
    return update


def same(one: StepSummary, other: StepSummary) -> None:
    for found, expected in zip(values(one), values(other), strict=True):
        assert (found is None) == (expected is None)
        assert expected is None or found == pytest.approx(expected, abs=1e-4, rel=1e-4)


def running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def values(update: StepSummary) -> list[object]:
    loss = update.loss
    return [
        loss.num_tokens, loss.num_tokens_dropped, loss.loss_nats, loss.kl_reference_nats, loss.behaviour_kl_nats,
        loss.entropy_nats, loss.clipped_share, update.mean_gap_nats, update.grad_norm, update.learning_rate,
        update.num_samples, update.num_hinted, update.num_rewarded, update.weights_changed_share,
        *(one.gain_nats for one in update.followed),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: "-".join(map(str, method.values())))
def test_the_same_batch_gives_the_same_loss_and_the_same_weights(
    base: Path, teams: Teams, tmp_path: Path, method: dict[str, object], cut: dict[str, object]
) -> None:
    alone = Trainer(base, settings_of(method))
    team = teams(base, settings_of(method | cut))

    for version in (1, 2):
        expected = step(alone, tmp_path / f"alone{version}", MIXED, version, method=method["method"])
        same(step(team, tmp_path / f"team{version}", MIXED, version, method=method["method"]), expected)

    before, after, found = (weights(folder) for folder in (base, tmp_path / "alone2", tmp_path / "team2"))
    assert found.keys() == after.keys()
    for name, value in after.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=0)
    assert max(float((after[name] - before[name]).abs().max()) for name in after) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rule", ["fall", "overlap"])
def test_the_same_hints_are_chosen(base: Path, teams: Teams, rule: str, cut: dict[str, object]) -> None:
    """With several offers in the first of the samples alone, one process has nothing to choose from."""
    samples = [MIXED[0], *(offered(f"m{number}") for number in range(9)), *MIXED]
    expected = Trainer(base, settings_of({"hint_choice": rule})).choose_hints(samples)
    assert len({*expected}) > 1
    team = teams(base, settings_of({"hint_choice": rule} | cut))
    assert team.choose_hints(samples) == expected
    assert team.choose_hints(samples[:2]) == expected[:2]
    assert team.choose_hints(MIXED) == (0,) * len(MIXED)


@pytest.mark.slow
def test_shares_leave_a_process_without_samples_and_the_step_is_the_same(
    base: Path, teams: Teams, tmp_path: Path
) -> None:
    for number, cut in enumerate((FSDP, DATA)):
        alone = Trainer(base, settings_of({}))
        expected = step(alone, tmp_path / f"alone{number}", MIXED[:1], 1)
        same(step(teams(base, settings_of(cut)), tmp_path / f"team{number}", MIXED[:1], 1), expected)
        after, found = (weights(tmp_path / f"{who}{number}") for who in ("alone", "team"))
        for name, value in after.items():
            torch.testing.assert_close(found[name], value, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 4], ids=["all weights", "adapter"])
@pytest.mark.parametrize("cut", CUTS)
def test_any_trainer_goes_on_from_what_any_other_wrote(
    bfloat16_base: Path, teams: Teams, tmp_path: Path, cut: dict[str, object], lora_rank: int | None
) -> None:
    """Rounded weights, float32 masters and moments: two processes, then one, and back."""
    both: dict[str, object] = {"lora_rank": lora_rank}
    first = Trainer(bfloat16_base, settings_of(both))
    step(first, tmp_path / "one", MIXED, 1)
    team = teams(bfloat16_base, settings_of(both | cut))
    team.restore(tmp_path / "one")
    second = step(team, tmp_path / "two", MIXED, 2)
    same(second, step(first, tmp_path / "two-alone", MIXED, 2))
    found, expected_state = (state(tmp_path / folder) for folder in ("two", "two-alone"))
    assert found.keys() == expected_state.keys()
    for name, value in expected_state.items():
        atol = 1e-3 * float(value.abs().max()) if name.startswith("optimizer/") else 1e-4  # squared gradients are tiny
        torch.testing.assert_close(found[name], value, atol=atol, rtol=0)
    alone = Trainer(bfloat16_base, settings_of(both))
    alone.restore(tmp_path / "two")

    third = step(alone, tmp_path / "three", MIXED, 3)

    same(third, step(first, tmp_path / "three-alone", MIXED, 3))
    after = weights(tmp_path / "three")
    atol, rtol = (2e-3, 8e-3) if lora_rank is None else (1e-4, 0.0)  # a bfloat16 apart; adapters are not rounded
    for name, value in weights(tmp_path / "three-alone").items():
        torch.testing.assert_close(after[name].float(), value.float(), atol=atol, rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: "-".join(map(str, method.values())))
def test_an_adapter_cut_over_processes_learns_what_a_whole_one_does(
    base: Path, teams: Teams, tmp_path: Path, method: dict[str, object], cut: dict[str, object]
) -> None:
    lora = method | ADAPTER
    alone = Trainer(base, settings_of(lora))
    step(alone, tmp_path / "alone1", MIXED, 1, method=method["method"])  # before it half of an adapter has no gradient
    team = teams(base, settings_of(lora | cut))
    team.restore(tmp_path / "alone1")

    expected = step(alone, tmp_path / "alone2", MIXED, 2, method=method["method"])
    same(step(team, tmp_path / "team2", MIXED, 2, method=method["method"]), expected)

    before, after, found = (weights(tmp_path / folder) for folder in ("alone1", "alone2", "team2"))
    assert found.keys() == after.keys()
    for name, value in after.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=0)
    assert all(float((after[name] - before[name]).abs().max()) > 2e-4 for name in after)


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 4], ids=["all weights", "adapter"])
@pytest.mark.parametrize("cut", CUTS)
def test_all_processes_settle_on_the_weights_that_are_served_and_keep_what_rounds_to_them(
    bfloat16_base: Path, teams: Teams, tmp_path: Path, cut: dict[str, object], lora_rank: int | None
) -> None:
    both: dict[str, object] = {"lora_rank": lora_rank}
    served = Trainer(bfloat16_base, settings_of(both))
    step(served, tmp_path / "served", MIXED, 1)
    team = teams(bfloat16_base, settings_of(both | cut))
    step(team, tmp_path / "another", MIXED[:2], 1)
    masters = state(tmp_path / "another")

    team.settle(tmp_path / "served")
    keep(team, tmp_path / "settled")

    expected, found = weights(tmp_path / "served"), weights(tmp_path / "settled")
    assert any(not torch.equal(value, expected[name]) for name, value in weights(tmp_path / "another").items())
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    settled = state(tmp_path / "settled")
    for name in (name for name in masters if name.startswith("masters/")):
        same_here = masters[name].to(torch.bfloat16) == expected[name.removeprefix("masters/")]
        assert bool(same_here.any())
        assert torch.equal(settled[name][same_here], masters[name][same_here]), "more exact than what is served"
    team.update(MIXED, version=2, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "started"),
    [pytest.param(FSDP, two_processes, id="fsdp"), pytest.param(TENSOR, partial(forked_processes, 2), id="tensor")],
)
def test_a_killed_process_is_named_and_a_resumed_run_has_the_same_numbers(
    base: Path, teams: Teams, tmp_path: Path, cut: dict[str, object], started: Callable[[], Processes]
) -> None:
    settings = settings_of(cut)
    processes = started()
    pids = processes.pids
    with closing(Team(base, settings, device="cpu", processes=processes)) as team:
        step(team, tmp_path / "one", MIXED, 1)
        os.kill(pids[1], signal.SIGKILL)
        named = rf"process 1 of the trainer's 2 \(pid {pids[1]}\) ended with status -9"
        with pytest.raises(PartUnavailable, match=named):
            team.update(MIXED, version=2, seed=2)
        assert not any(map(running, pids))

    whole = Trainer(base, settings_of({}))
    step(whole, tmp_path / "whole1", MIXED, 1)
    expected = step(whole, tmp_path / "whole2", MIXED, 2)
    resumed = teams(base, settings)
    resumed.restore(tmp_path / "one")
    same(step(resumed, tmp_path / "two", MIXED, 2), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(FSDP, id="fsdp"),
        pytest.param(TENSOR, id="tensor"),
        pytest.param(TENSOR | ADAPTER, id="tensor-adapter"),
    ],
)
def test_trainers_that_went_on_and_that_were_started_again_write_the_same_bytes(
    bfloat16_base: Path, teams: Teams, tmp_path: Path, cut: dict[str, object]
) -> None:
    settings = settings_of(cut)
    team = teams(bfloat16_base, settings)
    for version in (1, 2):
        step(team, tmp_path / f"went-on-{version}", MIXED, version)
    again = teams(bfloat16_base, settings)
    again.restore(tmp_path / "went-on-1")
    step(again, tmp_path / "again", MIXED, 2)

    def files(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert files(tmp_path / "again") == files(tmp_path / "went-on-2")


def test_a_plan_of_a_trainer_that_this_machine_can_not_have_is_executed_by_the_one_it_has(
    base: Path, tmp_path: Path
) -> None:
    planned = settings_of(FSDP)
    plan = BatchPlanned(
        policy_id="policy", policy_version=1, parent_version=0, sample_ids=tuple(s.sample_id for s in MIXED),
        offsets=(), seed=1, settings=planned.model_dump_json().encode(), planned_at_ms=0, turns=(),
    )  # fmt: skip
    stepper = Stepper(base, limits_of(base), machine=settings_of({}))
    checkpoint = stepper.execute(plan, tuple(MIXED), parent=None, versions=tmp_path / "versions", recorded=None)
    stepper.close()
    assert isinstance(checkpoint, Checkpoint)
    assert stepper._team is None


@pytest.mark.slow
def test_a_policy_is_trained_by_several_processes_through_a_rejected_step_and_they_end_with_it(
    base: Path, tmp_path: Path
) -> None:
    settings = settings_of(FSDP)
    alone = Trainer(base, settings_of({}))
    expected = step(alone, tmp_path / "alone", MIXED, 2)
    one_sided = tuple(tiny.sample(f"yes{i}", reward=1, hinted=True) for i in range(16))

    def plan(version: int, samples: Sequence[SampleAssembled]) -> BatchPlanned:
        return BatchPlanned(
            policy_id="policy", policy_version=version, parent_version=0,
            sample_ids=tuple(s.sample_id for s in samples), offsets=(), seed=version,
            settings=settings.model_dump_json().encode(), planned_at_ms=0, turns=(),
        )  # fmt: skip

    stepper = Stepper(base, limits_of(base))
    rejected = stepper.execute(
        plan(1, one_sided), one_sided, parent=None, versions=tmp_path / "versions", recorded=None
    )
    assert isinstance(rejected, StepRejected)
    assert "judge says yes to everything" in rejected.reason
    team = stepper._team
    assert team is not None
    assert isinstance(team._processes, Processes)
    pids = team._processes.pids
    checkpoint = stepper.execute(
        plan(2, MIXED), tuple(MIXED), parent=None, versions=tmp_path / "versions", recorded=None
    )
    assert isinstance(checkpoint, Checkpoint)
    assert stepper._team is team  # a refusal ends no process
    stepper.close()
    assert checkpoint.step.loss_nats == pytest.approx(expected.loss.loss_nats, abs=1e-4)
    found, after = weights(checkpoint.path), weights(tmp_path / "alone")
    for name, value in after.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=0)
    assert len(pids) == 2
    assert not any(map(running, pids))
