"""Each method on a small policy: what it learns from, how its gradient differs, several steps a batch."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from clawstream.config import TrainingSettings
from clawstream.events import SampleAssembled
from clawstream.training.batches.choosing import corrected_hint
from clawstream.training.step.batch_loss import Scored
from clawstream.training.step.carried import Carried, Schedule, ToolCalls
from clawstream.training.step.losses import Suffix
from clawstream.training.step.trainer import Trainer
from tests.parts.training import tiny
from tests.parts.training.step.test_trainer import MIXED, moved, on_policy, weights, with_settings


@pytest.mark.parametrize(("method", "learns_from"), [("binary", 0), ("opd", 1)])
def test_a_method_learns_only_from_its_own_signal(base: Path, method: str, learns_from: int) -> None:
    samples = [tiny.sample("reward", reward=-1), tiny.sample("hint", reward=None, hinted=True)]
    for index, s in enumerate(samples):
        trainer = Trainer(base, with_settings(method=method))
        before = weights(trainer)
        update = trainer.update(on_policy(trainer, [s]), version=1, seed=0)
        assert moved(before, weights(trainer)) == (index == learns_from)
        assert (update.grad_norm is None) == (index != learns_from)


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_teacher_s_distribution_brings_the_policy_nearer_to_its_hinted_self(
    base: Path, lora_rank: int | None
) -> None:
    settings = with_settings(method="topk", lora_rank=lora_rank, kl=0.0)
    trainer = Trainer(base, settings)
    samples = on_policy(trainer, [tiny.sample("a", reward=None, hinted=True)])
    first = trainer.update(samples, version=1, seed=0)
    second = trainer.update(samples, version=2, seed=0)
    assert first.loss.loss_nats is not None
    assert second.loss.loss_nats is not None
    assert 0 < second.loss.loss_nats < first.loss.loss_nats
    assert first.mean_gap_nats is not None
    assert first.mean_gap_nats != 0
    assert first.loss.clipped_share is None


def test_among_hinted_and_other_samples_the_teacher_s_distribution_counts_for_the_hinted_alone(base: Path) -> None:
    gradients = []
    hinted, other = tiny.sample("a", hinted=True), tiny.sample("b", reward=1, response_tokens=30)
    for samples in ([hinted], [hinted, other]):
        trainer = Trainer(base, with_settings(method="topk"))
        update = trainer.update(on_policy(trainer, samples), version=1, seed=0)
        assert (update.loss.num_tokens, update.loss.num_tokens_dropped) == (len(hinted.response_ids), 0)
        gradients.append(gradient_of(trainer))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


def gradient_of(trainer: Trainer) -> torch.Tensor:
    parameters = trainer._model.trained.values()
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 4])
def test_no_method_s_gradient_is_another_s(base: Path, lora_rank: int | None) -> None:
    gradients = {}
    for method in ("binary", "opd", "combined", "topk", "stepwise"):
        trainer = Trainer(base, with_settings(method=method, kl=0.0, lora_rank=lora_rank), max_grad_norm=1e9)
        advantages = [(-1.0) ** place for place in range(len(MIXED))] if method == "stepwise" else None
        trainer.update(on_policy(trainer, MIXED), version=1, seed=0, advantages=advantages)
        gradients[method] = gradient_of(trainer)
    for one, other in combinations(gradients, 2):
        cosine = torch.nn.functional.cosine_similarity(gradients[one], gradients[other], dim=0)
        assert float(cosine) < 0.99, (one, other)


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}, {"loss": "cispo"}, {"loss": "importance_sampling"}], ids=str)
def test_several_steps_a_batch_go_on_from_the_weights_before_the_first(base: Path, changes: dict[str, object]) -> None:
    """What the ratio starts from is scored once, so that from the second step on it is not 1."""
    settings = with_settings(epochs=4, **changes)
    one = Trainer(base, with_settings(**changes))
    trainer = Trainer(base, settings)
    samples = on_policy(trainer, MIXED)

    single, update = one.update(samples, version=1, seed=3), trainer.update(samples, version=1, seed=3)

    assert (update.loss.num_tokens, update.loss.num_tokens_dropped) == (single.loss.num_tokens, 0)
    steps = {float(state["step"]) for state in trainer._optimizer.state.values()}
    assert steps == {4.0}
    assert (update.loss.clipped_share is None) == (settings.loss == "importance_sampling")
    assert single.loss.clipped_share is None
    assert update.mean_gap_nats == pytest.approx(single.mean_gap_nats, rel=1e-4)
    assert update.loss.behaviour_kl_nats == pytest.approx(0.0, abs=1e-5)  # the engine's were those before the first


def test_the_combined_gradient_is_the_sum_of_both_where_both_speak(base: Path) -> None:
    """With a positive reward nothing is masked, so the gradients add up; clipping and the leash are out of the way."""
    sums = {}
    for method in ("binary", "opd", "combined"):
        trainer = Trainer(base, with_settings(method=method, w_topk=0, kl=0.0, learning_rate=1e-12), max_grad_norm=1e9)
        trainer.update(on_policy(trainer, [tiny.sample("a", reward=1, hinted=True)]), version=1, seed=0)
        sums[method] = {name: p.grad.clone() for name, p in trainer._model.trained.items() if p.grad is not None}

    for name, combined in sums["combined"].items():
        torch.testing.assert_close(combined, sums["binary"][name] + sums["opd"][name], atol=1e-5, rtol=1e-4)


def test_a_whole_distribution_adds_its_own_gradient_to_that_of_the_advantages(base: Path) -> None:
    """Of hinted samples alone, so that both are means over the same ones; the leash is out of the way."""
    samples = [tiny.sample("a", reward=-1, hinted=True), tiny.sample("b", reward=1, hinted=True, response_tokens=7)]
    plain = {"kl": 0.0, "learning_rate": 1e-12}
    gradients = []
    for changes in ({"w_topk": 0.5}, {"w_topk": 0}, {"method": "topk"}):
        trainer = Trainer(base, with_settings(**plain | changes), max_grad_norm=1e9)
        trainer._loss.objective = replace(trainer._loss.objective, divergence="forward")
        trainer.update(on_policy(trainer, samples), version=1, seed=0)
        gradients.append(gradient_of(trainer))
    both, advantages, divergence = gradients
    torch.testing.assert_close(both, advantages + 0.5 * divergence, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("method", "w_binary", "w_opd"), [("combined", 1, 1), ("binary", 1, 0), ("opd", 0, 1)])
def test_by_the_original_s_recipe_a_loss_is_the_published_one(
    base: Path, method: str, w_binary: int, w_opd: int
) -> None:
    """No gap is clipped or spared, no older token weighed, no usual reward subtracted, and the rate does not fall."""
    settings = TrainingSettings.model_validate({"recipe": "openclaw-rl", "method": method, "learning_rate": 1e-12})
    trainer = Trainer(base, settings, max_grad_norm=1e9)
    calls = ToolCalls(last_rewards=(-1.0,) * 8)
    trainer._carried = Carried(schedule=Schedule(num_updates=100), tool_calls=calls)
    s = replace(tiny.sample("a", reward=-1, hinted=True), calls_tools=True)
    assert s.hinted_prompt_ids is not None
    own = trainer._model.logprobs([Suffix(s.prompt_ids, s.response_ids, s.temperature)])[0]
    told = trainer._model.logprobs([Suffix(s.hinted_prompt_ids, s.response_ids, s.temperature)])[0]
    # A teacher that is so far from the policy that our bounds would hold.
    gap = 40 * (told - own).detach()
    assert (gap > 5).any()
    assert (gap < -5).any()
    advantage = w_binary * -1.0 + w_opd * gap
    loss = -(advantage * own).mean()
    expected = torch.autograd.grad(loss, list(trainer._model.trained.values()))
    scoring = trainer._loss.score

    def told_loudly(*arguments: Any, **options: Any) -> Scored:
        scored = scoring(*arguments, **options)
        return replace(scored, hinted={0: own.detach() + gap} if w_opd else {})

    trainer._loss.score = told_loudly  # type: ignore[method-assign]
    update = trainer.update([s], version=101, seed=0)

    torch.testing.assert_close(gradient_of(trainer), torch.cat([g.flatten() for g in expected]), atol=1e-5, rtol=1e-3)
    assert update.learning_rate == 1e-12


def test_without_a_weight_no_reward_says_anything_and_hints_teach_as_where_nothing_was_scored(base: Path) -> None:
    gradients = []
    for reward in (-1, 1, None):
        trainer = Trainer(base, with_settings(w_binary=0.0, learning_rate=1e-12))
        trainer.update(on_policy(trainer, [tiny.sample("a", reward=reward, hinted=True)]), version=1, seed=0)
        gradients.append(gradient_of(trainer))
    assert gradients[2].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[2], atol=0, rtol=0)
    torch.testing.assert_close(gradients[1], gradients[2], atol=0, rtol=0)
    assert TrainingSettings(w_binary=0.0).weights == (0.0, 1.0)


@pytest.mark.parametrize("method", ["combined", "binary", "opd", "topk"])
def test_thinking_counts_as_much_as_the_settings_say(base: Path, method: str) -> None:
    """All other tokens count as they did: with nothing for thinking, the gradient is theirs alone."""
    changes = {"method": method, "kl": 0.0, "learning_rate": 1e-12}

    def gradient(weight: float, **of_sample: Any) -> torch.Tensor:
        trainer = Trainer(base, with_settings(w_thinking=weight, **changes), max_grad_norm=1e9)
        [sample] = on_policy(trainer, [tiny.sample("a", reward=1, hinted=True)])
        trainer.update([replace(sample, **of_sample)], version=1, seed=0)
        return gradient_of(trainer)

    whole, half, none = (gradient(weight, num_thinking=3) for weight in (1.0, 0.5, 0.0))
    torch.testing.assert_close(whole, gradient(0.0), msg="without thinking nothing changes")
    torch.testing.assert_close(half, (whole + none) / 2, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(none, gradient(1.0, trained=(0, 0, 0, 1, 1, 1, 1)) * 4 / 7, atol=1e-5, rtol=1e-3)


def test_the_teacher_s_whole_distribution_counts_as_much_as_gaps_unless_it_is_said_otherwise(base: Path) -> None:
    gradients = []
    for changes in ({}, {"w_topk": 1.0}, {"w_topk": 0.0}):
        trainer = Trainer(base, with_settings(learning_rate=1e-12, **changes))
        trainer.update(on_policy(trainer, [tiny.sample("a", reward=-1, hinted=True)]), version=1, seed=0)
        gradients.append(gradient_of(trainer))
    unsaid, whole, gaps_alone = gradients
    torch.testing.assert_close(unsaid, whole)
    assert not torch.allclose(unsaid, gaps_alone, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"w_opd": 0.0}, "greater than 0"),
        ({"method": "binary", "w_binary": 0.0}, "w_binary = 0: method = .binary. learns from rewards"),
        ({"method": "stepwise", "w_binary": 0.0}, "w_binary = 0: method = .stepwise. learns from rewards"),
        (
            {"method": "binary", "teacher": "reference", "w_opd": 3.0},
            "w_opd, teacher: no effect: method = 'binary' learns from rewards alone",
        ),
        ({"method": "opd", "w_binary": 5.0}, "w_binary: no effect: method = 'opd' learns from hints alone"),
        ({"method": "stepwise", "w_opd": 0.5}, "w_opd: no effect"),
        ({"method": "stepwise", "teacher": "reference"}, "teacher: no effect"),
        ({"method": "topk", "loss": "cispo"}, "loss: no effect: method = 'topk' compares whole distributions"),
        ({"method": "topk", "w_binary": 0.5}, "w_binary: no effect"),
        ({"method": "opd", "w_topk": 0.5}, "w_topk: no effect"),
        ({"method": "binary", "cadence": "correction"}, "cadence: no effect"),
        ({"method": "binary", "rehearsal_share": 0.1}, "rehearsal_share: no effect"),
        ({"method": "stepwise", "late": "refresh", "answers_per_hint": 2}, "late, answers_per_hint: no effect"),
        ({"learning_rate": float("inf")}, "finite number"),
        ({"method": "binary", "hint_choice": "fall"}, "hint_choice: no effect: method = 'binary'"),
        ({"method": "stepwise", "hint_choice": "overlap"}, "hint_choice: no effect"),
        ({"hint_choice": "fall", "cadence": "correction"}, "hint_choice = 'fall' is made just before a step"),
        ({"hint_choice": "overlap", "teacher": "http://t:1"}, "hint_choice = 'overlap' is made just before a step"),
        ({"hint_choice": "overlap", "method": "topk"}, "method = 'topk' on the teacher's"),
    ],
    ids=str,
)
def test_settings_from_which_nothing_would_be_learned_or_that_would_do_nothing_are_refused(
    changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainingSettings(**changes)


@pytest.mark.parametrize("method", ["binary", "opd", "topk", "stepwise"])
def test_a_weight_of_0_may_be_written_where_there_is_nothing_to_weigh(method: str) -> None:
    written = TrainingSettings.model_validate({"method": method, "w_topk": 0.0, "rehearsal_share": 0.0})
    assert (written.method, written.rehearsed_share) == (method, 0.0)


@pytest.mark.parametrize(("reward", "pulled"), [(None, False), (1, True), (-1, True)])
def test_a_hint_that_changes_nothing_leaves_alone_what_others_taught_unless_its_answer_was_scored(
    base: Path, reward: int | None, pulled: bool
) -> None:
    """The policy is far from the base, which says the same with the hint and without."""
    trainer = Trainer(base, with_settings(method="combined", kl=0.0, learning_rate=1e-2))
    teach(trainer)
    plain = tiny.sample("taught", reward=reward)
    gradients = []
    for sample in (plain, said_nothing_by(plain)):
        scored = trainer._loss.score(on_policy(trainer, [sample]), reference=trainer._reference, moves=True)
        total, _, _ = trainer._loss.of(scored, [0])
        found = torch.autograd.grad(total, [*trainer._model.trained.values()], allow_unused=True)
        gradients.append(torch.cat([one.flatten() for one in found if one is not None]))
    assert torch.allclose(gradients[0], gradients[1], atol=1e-7) is not pulled


@pytest.mark.parametrize("kl", [0.0, 0.02])  # with a leash the base scores all answers without a hint at once
def test_how_far_a_hint_moves_the_base_is_known_of_each_hinted_answer(base: Path, kl: float) -> None:
    trainer = Trainer(base, with_settings(method="combined", kl=kl, learning_rate=1e-2))
    teach(trainer)
    sharp = tiny.sample("c", hinted=True, temperature=0.1)
    samples = [tiny.sample("a"), said_nothing_by(tiny.sample("b")), sharp]
    pulls = trainer._loss.score(on_policy(trainer, samples), reference=trainer._reference, moves=True).pulls
    assert set(pulls) == {1, 2}
    assert not pulls[1].any()
    assert 0 < float(pulls[2].max()) <= 1


@pytest.mark.parametrize(
    ("cadence", "answers", "fully"),
    [
        ("correction", "the new hint", True),
        ("correction", "a hint of before", False),
        ("correction", "as the correction itself", True),
        ("batch", "the new hint", False),
    ],
)
def test_an_answer_to_a_hint_that_was_just_said_is_pulled_everywhere_where_corrections_are_trained_on_at_once(
    base: Path, cadence: str, answers: str, fully: bool
) -> None:
    """The hint was said of a sample that another process of the trainer has in its share."""
    trainer = Trainer(base, with_settings(method="combined", cadence=cadence))
    correction = said_nothing_by(tiny.sample("correction", reward=None))
    answer = said_nothing_by(tiny.sample("answer", reward=None))
    if answers == "the new hint":
        answer = replace(answer, hint_id=corrected_hint(correction))
    elif answers == "a hint of before":
        answer = replace(answer, hint="another", hint_id=corrected_hint(replace(answer, hint="another")))
    scored = trainer._score(on_policy(trainer, [correction, answer]), [1], None)
    assert scored.pull(0).tolist() == ([] if fully else [0.0] * len(answer.response_ids))


def test_an_answer_given_again_to_a_hint_s_prompt_makes_no_correction_of_that_hint(base: Path) -> None:
    trainer = Trainer(base, with_settings(method="combined", cadence="correction"))
    again = replace(said_nothing_by(tiny.sample("again", reward=None)), refreshed_id="one of several answers")
    rehearsal = replace(said_nothing_by(tiny.sample("rehearsal", reward=None)), hint_id=corrected_hint(again))
    scored = trainer._score(on_policy(trainer, [again, rehearsal]), [1], None)
    assert scored.pull(0).tolist() == [0.0] * len(rehearsal.response_ids)


def teach(trainer: Trainer) -> None:
    for version in range(1, 4):
        trainer.update(on_policy(trainer, [tiny.sample("taught", reward=-1)]), version=version, seed=0)


def said_nothing_by(sample: SampleAssembled) -> SampleAssembled:
    """The sample with a hint that leaves its prompt as it is."""
    return replace(sample, hint="as ever", hinted_prompt_ids=sample.prompt_ids)
