"""Whole updates on a small policy: what each signal moves, what a checkpoint brings back, what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clawstream.config import TrainingSettings
from clawstream.errors import TrainingDiverged
from clawstream.events import SampleAssembled
from clawstream.training.step.carried import WINDOW, Carried, Schedule, ToolCalls
from clawstream.training.step.losses import Suffix
from clawstream.training.step.trainer import Trainer
from clawstream.training.torch_model import TorchModel
from tests.keeping import keep
from tests.parts.training import tiny

SETTINGS = TrainingSettings(learning_rate=1e-3, micro_batch_tokens=4096)
MIXED = [
    tiny.sample(f"s{i}", reward=(1, -1, None)[i % 3], hinted=i % 3 == 2 or i % 2 == 0, response_tokens=3 + i)
    for i in range(8)
]


def with_settings(**changes: object) -> TrainingSettings:
    return TrainingSettings(**(SETTINGS.model_dump() | changes))


def on_policy(trainer: Trainer, samples: list[SampleAssembled]) -> list[SampleAssembled]:
    """The samples with the log-probs that an engine on the current weights reports."""
    return [replace(s, response_logprobs=tuple(map(float, scored(trainer, s)))) for s in samples]


def scored(trainer: Trainer, s: SampleAssembled, *, hinted: bool = False) -> torch.Tensor:
    prompt = s.hinted_prompt_ids if hinted else s.prompt_ids
    assert prompt is not None
    return trainer._model.score([Suffix(prompt, s.response_ids, s.temperature)], weights=None, budget_tokens=4096)[0]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer._model.copy()


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("reward", [1, -1])
def test_a_reward_moves_the_answer_s_probability_its_way(base: Path, reward: int) -> None:
    trainer = Trainer(base, SETTINGS)
    (s,) = on_policy(trainer, [tiny.sample("a", reward=reward)])
    before = scored(trainer, s).sum()

    trainer.update([s], version=1, seed=0)

    assert float(scored(trainer, s).sum() - before) * reward > 0.01


def test_a_hint_alone_brings_the_policy_nearer_to_its_hinted_self(base: Path) -> None:
    trainer = Trainer(base, SETTINGS)
    (s,) = on_policy(trainer, [tiny.sample("a", reward=None, hinted=True)])
    teacher = scored(trainer, s, hinted=True)
    before = (teacher - scored(trainer, s)).abs().mean()

    trainer.update([s], version=1, seed=0)

    assert float((teacher - scored(trainer, s)).abs().mean()) < float(before)


def test_parts_that_outweigh_each_other_are_no_reward_beside_a_hint_either(base: Path) -> None:
    silent = tiny.sample("s", reward=None, hinted=True)
    outweighed = replace(silent, reward=-1, person_reward=1.0, num_feedback=1, total_reward=0.0)
    updates = []
    for sample in (silent, outweighed):
        trainer = Trainer(base, SETTINGS)
        updates.append(trainer.update([sample], version=1, seed=1))
    assert updates[0] == updates[1]
    assert updates[1].num_rewarded == 0


def test_a_step_says_how_sure_the_policy_was_and_how_far_the_engine_s_was_from_it(base: Path) -> None:
    trainer = Trainer(base, SETTINGS)
    samples = on_policy(trainer, MIXED)
    scores = trainer._model.token_scores([Suffix(s.prompt_ids, s.response_ids, s.temperature) for s in samples])
    entropy_BT = scores.entropy_BT
    assert entropy_BT is not None
    off = [replace(s, response_logprobs=tuple(v + 0.25 for v in s.response_logprobs if v is not None)) for s in samples]

    update = trainer.update(off, version=1, seed=0)

    assert update.loss.entropy_nats == pytest.approx(float(entropy_BT.nanmean()), rel=1e-4)
    assert update.loss.behaviour_kl_nats == pytest.approx(0.25, abs=1e-4)
    assert update.mean_response_tokens == sum(len(s.response_ids) for s in samples) / len(samples)
    assert update.weights_changed_share is not None
    assert 0.9 < update.weights_changed_share <= 1


def test_small_steps_add_up_though_what_is_published_is_rounded(bfloat16_base: Path, tmp_path: Path) -> None:
    """The weights that are trained are float32 throughout, also after a restart."""
    settings = with_settings(learning_rate=1e-5)
    whole = Trainer(bfloat16_base, settings)
    shares = [whole.update(on_policy(whole, MIXED), version=1, seed=0).weights_changed_share]
    keep(whole, tmp_path)
    resumed = Trainer(bfloat16_base, settings)
    resumed.restore(tmp_path)
    samples = on_policy(whole, MIXED)
    results = [trainer.update(samples, version=2, seed=0) for trainer in (whole, resumed)]
    assert results[0] == results[1]
    assert not moved(weights(whole), weights(resumed))
    for share in (*shares, results[0].weights_changed_share):
        assert share is not None
        assert 0 < share < 0.5
    engine = {name: value.to(torch.bfloat16).float() for name, value in weights(whole).items()}
    assert moved(weights(whole), engine)


def test_a_step_too_small_to_be_seen_in_what_is_published_is_an_error(bfloat16_base: Path) -> None:
    trainer = Trainer(bfloat16_base, with_settings(learning_rate=1e-12))
    with pytest.raises(TrainingDiverged, match=r"no published number has changed: in torch.bfloat16"):
        trainer.update(on_policy(trainer, MIXED), version=1, seed=0)


def test_at_a_rate_of_exactly_0_versions_are_published_and_each_is_the_base(bfloat16_base: Path) -> None:
    trainer = Trainer(bfloat16_base, with_settings(learning_rate=0.0))
    before = weights(trainer)

    updates = [trainer.update(on_policy(trainer, MIXED), version=version, seed=0) for version in (1, 2)]

    assert not moved(before, weights(trainer))
    assert all(update.grad_norm and update.weights_changed_share == 0 for update in updates)


def test_the_first_step_has_the_gradient_worked_out_by_hand(base: Path) -> None:
    """On policy, with a reward only, the loss is -reward times the mean log-prob of the answer."""
    trainer = Trainer(base, with_settings(kl=0.0), max_grad_norm=1e9)
    (s,) = on_policy(trainer, [tiny.sample("a", reward=-1, temperature=0.7)])
    leaf = trainer._model.logprobs([Suffix(s.prompt_ids, s.response_ids, s.temperature)])
    expected = torch.autograd.grad(leaf.mean(), list(trainer._model.trained.values()))

    update = trainer.update([s], version=1, seed=0)

    norm = torch.stack([g.square().sum() for g in expected]).sum().sqrt()
    assert update.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert update.loss.loss_nats == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(("calls_tools", "loss"), [(True, -0.25), (False, -1.0)])
def test_of_an_answer_that_calls_tools_what_is_usual_teaches_nothing(
    base: Path, calls_tools: bool, loss: float
) -> None:
    """On policy, with a reward only, the loss is minus what is wanted."""
    trainer = Trainer(base, with_settings(kl=0.0))
    trainer._carried = Carried(tool_calls=ToolCalls(last_rewards=(1.0,) * 7 + (-1.0,)))
    samples = on_policy(trainer, [tiny.sample("a", reward=1)])

    update = trainer.update([replace(samples[0], calls_tools=calls_tools)], version=1, seed=0)

    assert update.loss.loss_nats == pytest.approx(loss, rel=1e-4)
    assert update.mean_reward == 1.0, "it is on record as it was given"
    assert len(trainer._carried.tool_calls.last_rewards) == 8 + calls_tools


def test_the_rate_of_a_later_update_moves_the_weights_less(base: Path) -> None:
    moves = []
    for version in (8, 32):
        trainer = Trainer(base, SETTINGS)
        trainer._carried = Carried(schedule=Schedule(num_updates=version - 1))
        before = weights(trainer)["model.norm.weight"]
        update = trainer.update(MIXED, version=version, seed=0)
        moves.append((weights(trainer)["model.norm.weight"] - before).abs().mean())
        assert update.learning_rate == pytest.approx(1e-3 if version == 8 else 5e-4)

    assert float(moves[1] / moves[0]) == pytest.approx(0.5, rel=1e-3)


def test_a_large_gradient_is_cut_to_its_bound_and_reported_whole(base: Path) -> None:
    trainer = Trainer(base, SETTINGS, max_grad_norm=0.01)

    update = trainer.update(MIXED, version=1, seed=0)

    grads = [p.grad for p in trainer._model.trained.values() if p.grad is not None]
    assert float(torch.stack([g.square().sum() for g in grads]).sum().sqrt()) == pytest.approx(0.01, rel=1e-3)
    assert update.grad_norm is not None
    assert update.grad_norm > 0.1


def test_only_matrices_are_pulled_towards_zero(base: Path) -> None:
    """At a rate of 1 a decay of 0.5 halves a weight, beside the step itself, which is as large for both."""
    sizes = {}
    for decay in (0.0, 0.5):
        trainer = Trainer(base, with_settings(learning_rate=1.0), weight_decay=decay)
        before = weights(trainer)
        trainer.update(MIXED, version=1, seed=0)
        sizes[decay] = weights(trainer)

    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(sizes[0.0][name] - sizes[0.5][name], before[name] / 2, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(sizes[0.0]["model.norm.weight"], sizes[0.5]["model.norm.weight"])


def test_a_batch_of_equal_samples_has_the_gradient_of_one(base: Path) -> None:
    norms = []
    for count in (1, 3):
        trainer = Trainer(base, SETTINGS)
        norms.append(trainer.update(on_policy(trainer, [tiny.sample("a")]) * count, version=1, seed=0).grad_norm)

    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_small_pieces_give_the_same_step_as_the_whole_batch(base: Path) -> None:
    results = []
    for budget in (64, 4096):
        trainer = Trainer(base, with_settings(micro_batch_tokens=budget))
        update = trainer.update(on_policy(trainer, MIXED), version=1, seed=0)
        gradients = {name: p.grad.clone() for name, p in trainer._model.trained.items() if p.grad is not None}
        results.append((gradients, update))

    for name in results[0][0]:
        torch.testing.assert_close(results[0][0][name], results[1][0][name], atol=1e-6, rtol=1e-3)
    assert results[0][1].loss.loss_nats == pytest.approx(results[1][1].loss.loss_nats, rel=1e-5)


@pytest.mark.parametrize("change", [{"gradient_checkpointing": True}, {"dtype": "bfloat16"}])
def test_what_saves_time_or_memory_changes_the_step_by_its_rounding_alone(
    base: Path, change: dict[str, object]
) -> None:
    gradients = []
    for changes in ({}, change):
        trainer = Trainer(base, with_settings(**changes))
        trainer.update(on_policy(trainer, MIXED), version=1, seed=0)
        gradients.append(torch.cat([p.grad.flatten() for p in trainer._model.trained.values() if p.grad is not None]))

    assert float(torch.cosine_similarity(gradients[0], gradients[1], dim=0)) > 0.99
    assert torch.equal(gradients[0], gradients[1]) == ("dtype" not in change)


def test_a_question_is_computed_once_with_its_hint_and_without(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = tiny.sample("a", hinted=True, prompt_tokens=40)
    computed: dict[float, int] = {}
    for kl in (0.02, 0.0):  # without a leash the answer is scored without the hint in a pass of its own
        trainer = Trainer(base, with_settings(teacher="contrast", kl=kl))
        assert isinstance(trainer._model, TorchModel)
        forward = trainer._model._core.model.forward

        def counted(*args: Any, forward: Any = forward, kl: float = kl, **more: Any) -> Any:
            computed[kl] = computed.get(kl, 0) + more["input_ids"].numel()
            return forward(*args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(trainer._model._core.model, "forward", counted)
            trainer.update([sample], version=1, seed=0)

    assert computed[0.0] - computed[0.02] == 40


def test_the_same_plan_gives_the_same_bytes(base: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        trainer = Trainer(base, SETTINGS)
        trainer.update(MIXED, version=1, seed=7)
        keep(trainer, tmp_path / name)

    for file in (tmp_path / "one").rglob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "two" / file.relative_to(tmp_path / "one")).read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"teacher": "contrast"},
        {"lora_rank": 2},
        {"epochs": 2},
        {"method": "topk"},
    ],
    ids=str,
)
def test_going_on_from_a_checkpoint_is_going_on(base: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    settings = with_settings(**changes)
    whole = Trainer(base, settings)
    whole.update(MIXED[:4], version=1, seed=1)
    keep(whole, tmp_path)
    resumed = Trainer(base, settings)
    resumed.restore(tmp_path)

    results = [trainer.update(MIXED[4:], version=2, seed=2) for trainer in (whole, resumed)]

    assert results[0] == results[1]
    assert not moved(weights(whole), weights(resumed))


def test_a_restarted_trainer_knows_how_the_policy_has_fared(base: Path, tmp_path: Path) -> None:
    """A window of good answers, then one of bad ones: the rate starts again, across a restart of the trainer."""
    settings = with_settings(learning_rate=1e-6)
    good, bad = ([tiny.sample(f"{reward}-{i}", reward=reward) for i in range(128)] for reward in (1, -1))
    trainer = Trainer(base, settings)
    trainer._carried = Carried(schedule=Schedule(num_updates=39))
    first = trainer.update(good, version=40, seed=0)
    keep(trainer, tmp_path)
    resumed = Trainer(base, settings)
    resumed.restore(tmp_path)

    results = [one.update(bad, version=41, seed=0) for one in (trainer, resumed)]

    assert first.learning_rate == pytest.approx(1e-6 * (8 / 40) ** 0.5)
    assert [one.learning_rate for one in results] == [1e-6, 1e-6]


@pytest.mark.parametrize("method", ["opd", "topk"])
def test_a_restarted_trainer_knows_how_far_hints_were_from_the_policy(base: Path, tmp_path: Path, method: str) -> None:
    """Hints that want what no hint wanted before: the rate starts again, without any reward, after a restart too."""
    trainer = Trainer(base, with_settings(learning_rate=1e-6, method=method))
    samples = on_policy(trainer, [tiny.sample(f"h{i}", reward=None, hinted=True) for i in range(16)])
    gaps = [float((scored(trainer, s) - scored(trainer, s, hinted=True)).mean()) for s in samples]
    near = Schedule(num_updates=39, last_gaps=(-1.0,) * WINDOW, least_gap=-1.0)
    trainer._carried = Carried(schedule=near)

    first = trainer.update(samples, version=40, seed=0)
    keep(trainer, tmp_path)
    resumed = Trainer(base, trainer._settings)
    resumed.restore(tmp_path)

    assert resumed._carried == trainer._carried
    assert resumed._carried.schedule.last_gaps[-16:] == pytest.approx(gaps, abs=1e-4)
    assert first.mean_gap_nats == pytest.approx(-sum(gaps) / 16, abs=1e-4), "all answers are as long"
    resumed._carried = Carried(schedule=replace(near, last_gaps=(*[-1.0] * 8, *[9.0] * 120)))
    rates = [resumed.update(samples, version=version, seed=0).learning_rate for version in (41, 42)]
    assert rates == [pytest.approx(1e-6 * (8 / 40) ** 0.5), 1e-6]


def test_the_reference_is_the_base_also_after_a_restart(base: Path, tmp_path: Path) -> None:
    trainer = Trainer(base, SETTINGS)
    first = trainer.update(on_policy(trainer, MIXED), version=1, seed=0)
    keep(trainer, tmp_path)
    resumed = Trainer(base, SETTINGS)
    resumed.restore(tmp_path)

    second = resumed.update(on_policy(resumed, MIXED), version=2, seed=0)

    assert first.loss.kl_reference_nats == pytest.approx(0.0, abs=1e-6)
    assert second.loss.kl_reference_nats is not None
    assert second.loss.kl_reference_nats > 1e-4


def test_a_missing_log_prob_drops_its_token_and_no_other(base: Path) -> None:
    trainer = Trainer(base, SETTINGS)
    (s,) = on_policy(trainer, [tiny.sample("a")])

    update = trainer.update([replace(s, response_logprobs=(None, *s.response_logprobs[1:]))], version=1, seed=0)

    assert update.loss.num_tokens_dropped == 1
    assert update.loss.num_tokens == len(s.response_ids) - 1
    assert update.grad_norm is not None


def test_untrained_tokens_do_not_count(base: Path) -> None:
    trainer = Trainer(base, SETTINGS)
    s = tiny.sample("a")

    update = trainer.update([replace(s, trained=(0, 0, *s.trained[2:]))], version=1, seed=0)

    assert (update.loss.num_tokens, update.loss.num_tokens_dropped) == (len(s.response_ids) - 2, 0)


def test_figures_are_absent_where_there_is_nothing_to_average(base: Path) -> None:
    trainer = Trainer(base, SETTINGS)

    rewarded = trainer.update([tiny.sample("a", reward=-1)], version=1, seed=0)
    hinted = trainer.update([tiny.sample("b", reward=None, hinted=True)], version=2, seed=0)

    assert (rewarded.mean_reward, rewarded.mean_gap_nats, rewarded.loss.clipped_share) == (-1.0, None, None)
    assert hinted.mean_reward is None
    assert hinted.mean_gap_nats is not None


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(base: Path) -> None:
    trainer = Trainer(base, SETTINGS)
    before = weights(trainer)
    trainer._model.trained["model.norm.weight"].register_hook(lambda grad: grad * torch.nan)  # type: ignore[no-untyped-call]

    with pytest.raises(TrainingDiverged, match="update 1"):
        trainer.update(MIXED, version=1, seed=0)

    assert not moved(before, weights(trainer))
