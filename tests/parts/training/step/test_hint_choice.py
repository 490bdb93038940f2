"""Which of several offered hints is trained on: each rule's choice, worked out by hand, and that it stays the same."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clawstream.events import BatchPlanned, HintHeld, OfferedHint, SampleAssembled
from clawstream.stream.stage import Record
from clawstream.stream.topics import MEMORY
from clawstream.training.base_folder import limits_of
from clawstream.training.batches.planning import Batch
from clawstream.training.batches.trainable import offers, with_offer
from clawstream.training.checkpoints import Checkpoint, latest
from clawstream.training.step.losses import (
    SUPPORT_CLIP_NATS,
    Objective,
    Suffix,
    support_advantages,
    support_loss,
)
from clawstream.training.step.trainer import Trainer
from clawstream.training.stepping import Stepper
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.training import tiny
from tests.parts.training.batches.test_batches import plan_of
from tests.parts.training.step.test_methods import gradient_of
from tests.parts.training.step.test_trainer import MIXED, moved, on_policy, weights, with_settings
from tests.parts.training.test_loop import settings, trained_until


def offered(name: str, *, others: int = 2, reward: int | None = -1) -> SampleAssembled:
    """A sample with a hint, and so many others that were offered beside it."""
    prompts = [tiny.sample(f"{name} {number}", hinted=True) for number in range(others)]
    own = tiny.sample(name, reward=reward, hinted=True, response_tokens=6)
    hints = [
        OfferedHint(hint=f"other {number}", hinted_prompt_ids=own.prompt_ids + one.prompt_ids[:4])
        for number, one in enumerate(prompts)
    ]
    return replace(own, other_hints=tuple(hints), trained=(1, 1, 1, 1, 1, 0))


MANY = [offered(f"m{number}") for number in range(12)]


def answer_logits(trainer: Trainer, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """The logits [T, V] of an answer, by the whole model of transformers."""
    core = trainer._model._core  # type: ignore[attr-defined]
    core.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits_LV: Tensor = core(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0].float()
    core.set_attn_implementation("clawstream_tree")
    return logits_LV[len(prompt) - 1 : -1]


def trained(base: Path, **changes: object) -> Trainer:
    """A trainer whose policy is no longer its base."""
    trainer = Trainer(base, with_settings(learning_rate=5e-3, **changes))
    for version in range(1, 9):
        trainer.update(on_policy(trainer, MIXED), version=version, seed=0)
    return trainer


def fallen(base: Trainer, sample: SampleAssembled) -> int:
    """The offer under which the base finds the trained tokens least likely, less what it says without a hint."""

    def logp(prompt: Sequence[int]) -> float:
        logp_TV = answer_logits(base, prompt, sample.response_ids).log_softmax(1)
        return sum(float(logp_TV[t, token]) for t, token in enumerate(sample.response_ids) if sample.trained[t])

    falls = [logp(sample.prompt_ids) - logp(one.hinted_prompt_ids) for one in offers(sample)]
    return falls.index(max(falls))


def overlapping(base: Trainer, policy: Trainer, sample: SampleAssembled) -> int:
    """The offer whose four likeliest tokens by the base are most often among the policy's four without a hint."""

    def likeliest(model: Trainer, prompt: Sequence[int]) -> list[set[int]]:
        tops_TK = answer_logits(model, prompt, sample.response_ids).topk(4).indices.tolist()
        return [set(ids) for ids, is_trained in zip(tops_TK, sample.trained, strict=True) if is_trained]

    own = likeliest(policy, sample.prompt_ids)
    shared = [
        sum(len(ours & theirs) for ours, theirs in zip(own, likeliest(base, one.hinted_prompt_ids), strict=True))
        for one in offers(sample)
    ]
    return shared.index(max(shared))


@pytest.mark.parametrize("teacher", ["contrast", "reference"])
def test_by_the_fall_the_hint_is_taken_that_lowers_the_answer_most(base: Path, teacher: str) -> None:
    policy = trained(base, hint_choice="fall", teacher=teacher)
    start = Trainer(base, with_settings())
    expected = tuple(fallen(start, sample) for sample in MANY)
    assert set(expected) == {0, 1, 2}
    assert expected != tuple(fallen(policy, sample) for sample in MANY)
    assert policy.choose_hints(MANY) == expected


def test_by_the_overlap_the_hint_is_taken_whose_teacher_is_nearest_to_the_policy(base: Path) -> None:
    policy = trained(base, hint_choice="overlap")
    start = Trainer(base, with_settings())
    expected = tuple(overlapping(start, policy, sample) for sample in MANY)
    assert set(expected) == {0, 1, 2}
    assert expected != tuple(overlapping(start, start, sample) for sample in MANY)
    assert policy.choose_hints(MANY) == expected


@pytest.mark.parametrize("rule", ["fall", "overlap"])
def test_a_choice_depends_on_its_own_sample_and_the_weights_alone(base: Path, rule: str) -> None:
    policy = trained(base, hint_choice=rule)
    before = weights(policy)
    chosen = dict(zip((one.turn_id for one in MANY), policy.choose_hints(MANY), strict=True))
    among = [MIXED[0], *MANY[::-1], MIXED[3]]
    assert policy.choose_hints(among) == (0, *(chosen[one.turn_id] for one in MANY[::-1]), 0)
    assert policy.choose_hints(MANY[3:4]) == (chosen["m3"],)
    assert not moved(before, weights(policy))


@pytest.mark.parametrize("rule", ["fall", "overlap"])
def test_of_equal_hints_the_longest_is_taken(base: Path, rule: str) -> None:
    sample = offered("a")
    assert sample.hinted_prompt_ids is not None
    same = tuple(replace(one, hinted_prompt_ids=sample.hinted_prompt_ids) for one in sample.other_hints)
    trainer = Trainer(base, with_settings(hint_choice=rule))
    assert trainer.choose_hints([replace(sample, other_hints=same)]) == (0,)


def test_the_longest_is_taken_where_nothing_else_is_said_and_a_sample_keeps_its_id(base: Path) -> None:
    assert Trainer(base, with_settings()).choose_hints(MANY) == (0,) * len(MANY)
    sample = MANY[0]
    taken = with_offer(sample, 2)
    assert (taken.hint, taken.hinted_prompt_ids) == ("other 1", sample.other_hints[1].hinted_prompt_ids)
    assert (taken.sample_id, taken.other_hints) == (sample.sample_id, ())


def test_a_hint_that_the_model_cannot_read_is_not_taken(base: Path) -> None:
    """It is the one that would be taken, and its prompt gets a token that the model does not have."""
    numbers = Trainer(base, with_settings(hint_choice="fall")).choose_hints(MANY)
    index = next(index for index, number in enumerate(numbers) if number == 2)
    last = replace(MANY[index].other_hints[1], hinted_prompt_ids=(*MANY[index].prompt_ids, tiny.VOCABULARY))
    sample = replace(MANY[index], other_hints=(MANY[index].other_hints[0], last))
    plan = plan_of(Batch(samples=(sample,), offsets=()), 1)
    plan = replace(plan, settings=with_settings(hint_choice="fall").model_dump_json().encode())
    [taken] = Stepper(base, limits_of(base)).choose(plan, (sample,), parent=None, recorded=False)
    assert taken.hint in {sample.hint, "other 0"}


def test_policies_that_take_turns_choose_as_each_would_alone(base: Path, tmp_path: Path) -> None:
    """Each has a version of its own, and the trainer goes from one to the other between choice and step."""
    training = with_settings(hint_choice="overlap", gate=False, learning_rate=5e-3).model_dump_json().encode()
    taught = {"ann": MIXED, "ben": [replace(one, reward=1, total_reward=1.0) for one in MIXED[::-1]]}

    def plan(policy_id: str, samples: Sequence[SampleAssembled], version: int) -> BatchPlanned:
        made = plan_of(Batch(samples=tuple(samples), offsets=()), version)
        return replace(made, policy_id=policy_id, settings=training)

    stepper, parents = Stepper(base, limits_of(base)), dict[str, Path]()
    for name, samples in taught.items():
        made = stepper.execute(
            plan(name, samples, 1), tuple(samples), parent=None, versions=tmp_path / name, recorded=None
        )
        assert isinstance(made, Checkpoint)
        stepper.keep(made)
        parents[name] = made.path

    def chosen(stepper: Stepper, name: str) -> list[str | None]:
        found = stepper.choose(plan(name, MANY, 2), tuple(MANY), parent=parents[name], recorded=False)
        return [sample.hint for sample in found]

    alone = {name: chosen(Stepper(base, limits_of(base)), name) for name in taught}
    assert alone["ann"] != alone["ben"]
    assert [chosen(stepper, name) for name in ("ann", "ben", "ann")] == [alone[name] for name in ("ann", "ben", "ann")]


@pytest.mark.parametrize("rule", ["fall", "overlap"])
async def test_what_was_chosen_is_held_and_a_plan_that_is_executed_again_chooses_the_same(
    base: Path, tmp_path: Path, rule: str
) -> None:
    whole, cut = MemoryLog(MemoryBroker()), MemoryLog(MemoryBroker())
    for log in (whole, cut):
        await log.append(MANY[:6])
    training = {"hint_choice": rule, "gate": False}
    events = await trained_until(whole, settings(base, tmp_path / "whole", **training), 2)
    plans = [event for event in events if isinstance(event, BatchPlanned)]
    await cut.append([events[0], plans[0]])

    await trained_until(cut, settings(base, tmp_path / "cut", **training), 2)

    held = [await held_on(log) for log in (whole, cut)]
    assert held[0] == held[1]
    assert {hint for _, hint in held[0]} > {"keep it plain"}
    found = [latest(tmp_path / name / "policies" / "policy") for name in ("whole", "cut")]
    files = [(one.path / "model.safetensors").read_bytes() for one in found if one is not None]
    assert len(files) == 2
    assert files[0] == files[1]


async def held_on(log: MemoryLog) -> list[tuple[str, str]]:
    held = []
    async for records in log.follow([MEMORY], "earliest", until_end=True):
        events = [one.event for one in records if isinstance(one, Record)]
        held += [(event.turn_id, event.hint) for event in events if isinstance(event, HintHeld)]
    return sorted(held)


def test_by_the_overlap_the_policy_moves_to_its_teacher_on_its_own_likeliest_tokens(base: Path) -> None:
    """The gradient, worked out from transformers' logits: of the policy's four, each by its share and bounded gap."""
    trainer = Trainer(base, with_settings(hint_choice="overlap", kl=0.0, learning_rate=1e-12), max_grad_norm=1e9)
    sample = tiny.sample("a", reward=None, hinted=True)
    assert sample.hinted_prompt_ids is not None
    own_TV = answer_logits(trainer, sample.prompt_ids, sample.response_ids).log_softmax(1)
    told_TV = answer_logits(trainer, sample.hinted_prompt_ids, sample.response_ids).log_softmax(1)
    old_TK, ids_TK = own_TV.topk(4)
    gap_TK = told_TV.gather(1, ids_TK) - old_TK
    assert (gap_TK.abs() > SUPPORT_CLIP_NATS).any()
    share_TK = old_TK.exp() / old_TK.exp().sum(1, keepdim=True)
    advantage_TK = share_TK * gap_TK.clamp(-SUPPORT_CLIP_NATS, SUPPORT_CLIP_NATS)
    suffix = Suffix(sample.prompt_ids, sample.response_ids, sample.temperature)
    new_TK = trainer._model.token_scores([suffix], [ids_TK]).among_BTK[0]
    expected = torch.autograd.grad(-(advantage_TK * new_TK).sum(1).mean(), list(trainer._model.trained.values()))

    trainer.update(on_policy(trainer, [sample]), version=1, seed=0)

    found = gradient_of(trainer)
    torch.testing.assert_close(found, torch.cat([part.flatten() for part in expected]), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("changes", [{}, {"recipe": "openclaw-rl"}, {"teacher": "contrast", "w_topk": 1.0}], ids=str)
def test_by_the_overlap_a_hint_that_changes_nothing_teaches_nothing(base: Path, changes: dict[str, object]) -> None:
    """The hinted prompt is the prompt: the teacher is the policy, and no token has a gap."""
    sample = tiny.sample("a", reward=None, hinted=True)
    sample = replace(sample, hinted_prompt_ids=sample.prompt_ids)
    trainer = Trainer(base, with_settings(hint_choice="overlap", kl=0.0, learning_rate=0.0, **changes))
    update = trainer.update(on_policy(trainer, [sample]), version=1, seed=0)
    assert update.grad_norm == pytest.approx(0.0, abs=1e-4)
    assert update.loss.num_tokens == len(sample.response_ids)


def test_by_the_overlap_samples_without_a_hint_are_trained_on_as_before(base: Path) -> None:
    gradients = []
    for choice in ("longest", "overlap"):
        trainer = Trainer(base, with_settings(hint_choice=choice, w_topk=0.0, teacher="reference"))
        rewarded = [tiny.sample("a", reward=1), tiny.sample("b", reward=-1, response_tokens=9)]
        trainer.update(on_policy(trainer, rewarded), version=1, seed=0)
        gradients.append(gradient_of(trainer))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_likeliest_token_s_advantage_is_its_share_of_their_probability_times_its_bounded_gap() -> None:
    old_TK = torch.tensor([[0.5, 0.25]]).log()
    found = support_advantages(old_TK, torch.tensor([[0.3, -7.0]]))
    torch.testing.assert_close(found, torch.tensor([[2 / 3 * 0.3, -1 / 3 * SUPPORT_CLIP_NATS]]))


@pytest.mark.parametrize("loss", ["ppo", "importance_sampling", "cispo"])
def test_a_place_with_a_number_that_is_missing_has_no_loss_and_no_gradient(loss: str) -> None:
    new = torch.tensor([[[-1.0, -2.0], [-1.0, -2.0]]], requires_grad=True)
    old = torch.tensor([[[-1.0, -2.0], [-1.0, torch.nan]]])
    advantage = torch.tensor([[[0.5, -0.2], [0.5, -0.2]]])
    loss_BT = support_loss(new, old, advantage, objective=Objective(loss=loss))  # type: ignore[arg-type]
    loss_BT.sum().backward()  # type: ignore[no-untyped-call]
    assert float(loss_BT[0, 1].detach()) == 0
    torch.testing.assert_close(new.grad, torch.tensor([[[-0.5, 0.2], [0.0, 0.0]]]))
