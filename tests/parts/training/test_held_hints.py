"""What a step finds of held hints: answers that followed them and were rejected, and what it would forget."""

from dataclasses import replace
from functools import cache
from itertools import islice
from math import nan
from pathlib import Path
from statistics import fmean

import pytest

from clawstream.config import TrainingSettings
from clawstream.events import (
    FollowedHint,
    HintHeld,
    HintRetired,
    KeptHint,
    Rehearsed,
    Retired,
    SampleAssembled,
    StepTaken,
    float32,
    hint_id_of,
)
from clawstream.stream.topics import MEMORY
from clawstream.training.batches.memory import CONTRADICTED_AFTER, MERGED_STEPS, OPEN_NATS, Trial, merged_into
from clawstream.training.batches.planning import Batch
from clawstream.training.batches.trainable import ModelLimits, held_of
from clawstream.training.checkpoints import Checkpoint
from clawstream.training.gating import write
from clawstream.training.publishing import (
    HELD_ANSWERS,
    LOOKED_AT,
    AnswerLikelihood,
    GateMemory,
    HeldAnswer,
)
from clawstream.training.rehearsing import Rehearsing
from clawstream.training.step.losses import Suffix
from clawstream.training.step.trainer import Trainer
from clawstream.training.stepping import Stepper
from clawstream.training.torch_model import TorchModel
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.projections import one_memory
from tests.parts.training import tiny
from tests.parts.training.batches.test_batches import plan_of
from tests.parts.training.test_loop import settings, trained_until
from tests.parts.training.test_rehearsals import rehearsal
from tests.unit.stream import toys
from tests.unit.training.test_memory import plan, step

HINT, END = (20, 21, 22), (5, 6)


@cache
def model(base: Path) -> TorchModel:
    return TorchModel.load(base)


def said(base: Path, name: str, *, follows: bool, reward: int = -1, hint: bool = False) -> SampleAssembled:
    """Ann's sample, whose answer the base wrote with the hint in its prompt, or without it."""
    plain = tiny.sample(name)
    prompt, hinted = (*plain.prompt_ids, *END), (*plain.prompt_ids, *HINT, *END)
    question = Suffix(hinted if follows else prompt, plain.response_ids, 1.0)
    [answer] = write(model(base), [question], limit_tokens=12, seed=len(name)) or []
    return replace(
        plain,
        prompt_ids=prompt,
        hint="in verse" if hint else None,
        hinted_prompt_ids=hinted if hint else None,
        response_ids=answer.token_ids,
        response_logprobs=float32([-1.0] * len(answer.token_ids)),
        trained=(1,) * len(answer.token_ids),
        versions=(replace(plain.versions[0], num_tokens=len(answer.token_ids)),),
        reward=reward,
        total_reward=float(reward),
        key_name="ann",
    )


def trial_of(sample: SampleAssembled) -> Trial:
    prompt_ids = (*sample.prompt_ids[: -len(END)], *HINT, *END)
    return Trial(
        hint_id="held", sample_id=sample.sample_id, hinted_prompt_ids=prompt_ids, accepted=False, least_gain_nats=1.0
    )


def gain(base: Path, sample: SampleAssembled, trial: Trial) -> float:
    with_it = Suffix(trial.hinted_prompt_ids, sample.response_ids, sample.temperature)
    both = [with_it, with_it._replace(prompt_ids=sample.prompt_ids)]
    hinted_T, plain_T = model(base).score(both, weights=None, budget_tokens=999)
    return float((hinted_T - plain_T).sum())


def test_a_step_says_which_answers_followed_a_hint_that_nobody_said_of_them(base: Path) -> None:
    taught = said(base, "taught", follows=False, hint=True)
    samples = [said(base, f"{n}", follows=n % 2 == 0) for n in range(8)]
    trials = [replace(trial_of(s), accepted=n % 3 > 0) for n, s in enumerate(samples)]
    gains = [gain(base, s, trial) for s, trial in zip(samples, trials, strict=True)]
    near = sorted(gains)[4]  # so some gain just enough, and others just not
    trials = [replace(trial, least_gain_nats=near - 1e-3) for trial in trials]
    trainer = Trainer(base, TrainingSettings(learning_rate=1e-2))
    trainer.update([taught], version=1, seed=1)  # from now on the policy is not the base

    found = trainer.update(samples, version=2, seed=2, trials=trials).followed

    followed = [n for n, nats in enumerate(gains) if nats >= near]
    assert len(followed) == 4
    assert [(one.accepted, one.sample_id) for one in found] == [
        (trials[n].accepted, trials[n].sample_id) for n in followed
    ]
    assert [one.gain_nats for one in found] == pytest.approx([gains[n] for n in followed], abs=1e-4)
    assert {one.hint_id for one in found} == {"held"}


@pytest.mark.parametrize("teacher", ["contrast", "reference"])
def test_a_step_says_how_much_an_answer_gains_by_the_hint_that_it_rehearses(base: Path, teacher: str) -> None:
    training = TrainingSettings.model_validate({"teacher": teacher, "kl": 0.01})
    one = rehearsal("r")
    [found] = Trainer(base, training).update([tiny.sample("a"), one], version=1, seed=1).rehearsed
    asked = Trial(
        hint_id="", sample_id="", hinted_prompt_ids=one.hinted_prompt_ids or (), accepted=True, least_gain_nats=0
    )
    assert found.gain_nats == pytest.approx(gain(base, one, asked), abs=1e-4)


def test_a_trial_that_the_context_has_no_room_for_is_left_out(base: Path, tmp_path: Path) -> None:
    short, long = said(base, "a", follows=True), said(base, "long", follows=True)
    long = replace(long, prompt_ids=(*(7,) * 20, *long.prompt_ids))
    trials = [replace(trial_of(sample), least_gain_nats=-99.0) for sample in (short, long)]
    room = len(long.prompt_ids) + len(long.response_ids)  # for the sample, not for a hint more
    plan = replace(plan_of(Batch(samples=(short, long), offsets=()), 1), settings=b'{"learning_rate": 1e-3}')
    found = Stepper(base, ModelLimits(context_tokens=room)).execute(
        plan, (short, long), parent=None, versions=tmp_path, recorded=None, trials=trials
    )
    assert isinstance(found, Checkpoint)
    assert [one.sample_id for one in found.step.followed] == [short.sample_id]


def rehearsed(base: Path, hint_id: str, least_nats: float) -> SampleAssembled:
    """An answer of the base that rehearses and follows the hint, and gains this much by it at least."""
    for n in range(99):
        one = said(base, f"rehearsal {n}", follows=True, hint=True)
        if gain(base, one, trial_of(one)) >= least_nats:
            asked = Suffix(one.hinted_prompt_ids or (), one.response_ids, 1.0)
            [logp_T] = model(base).score([asked], weights=None, budget_tokens=999)
            again = replace(one, hint_id=hint_id, refreshed_id="again", reward=None, total_reward=None)
            return replace(again, response_logprobs=float32(logp_T.tolist()))
    raise AssertionError("no answer gains so much")


async def test_a_hint_whose_person_rejects_answers_that_follow_it_is_retired(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    chosen = settings(base, tmp_path, batch_samples=1, gate=False, rehearsal_share=0.5, learning_rate=1e-6)
    taught = said(base, "taught", follows=False, hint=True)
    hint_id = hint_id_of("policy", "ann", "in verse")
    rehearsal = rehearsed(base, hint_id, 2.0)
    named = (said(base, f"x{n}", follows=True) for n in range(99))
    followed = (s for s in named if gain(base, s, trial_of(s)) > gain(base, rehearsal, trial_of(rehearsal)) / 2)
    rejected = [*islice(followed, CONTRADICTED_AFTER)]
    later = [said(base, name, follows=True, reward=1) for name in ("later", "last")]
    batches = [[taught], [rehearsal, replace(later[0], key_name="bob")], *([one] for one in rejected), [later[1]]]

    async def retired() -> list[tuple[str, Retired]]:
        events = [one.event for one in await toys.read(log, MEMORY)]
        return [(event.hint_id, event.reason) for event in events if isinstance(event, HintRetired)]

    for version, samples in enumerate(batches, 1):
        assert (await retired() == []) or version == len(batches)
        await log.append(samples)
        events = await trained_until(log, chosen, version)
    found = [one for event in events if isinstance(event, StepTaken) for one in event.followed]
    assert [(one.hint_id, one.accepted) for one in found] == [(hint_id, False)] * CONTRADICTED_AFTER
    assert await retired() == [(hint_id, Retired.CONTRADICTED)]


async def test_a_prompt_whose_accepted_answer_followed_a_hint_is_held_for_it(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    chosen = settings(base, tmp_path, batch_samples=1, gate=False, rehearsal_share=0.5, learning_rate=1e-6)
    rehearsal = rehearsed(base, hint_id_of("policy", "ann", "in verse"), 2.0)
    least = gain(base, rehearsal, trial_of(rehearsal)) / 2
    named = (said(base, f"x{n}", follows=True, reward=1) for n in range(99))
    accepted = next(s for s in named if gain(base, s, trial_of(s)) > least)
    taught, other = said(base, "taught", follows=False, hint=True), said(base, "other", follows=True)
    for version, samples in enumerate(([taught], [rehearsal, replace(other, key_name="bob")], [accepted]), 1):
        await log.append(samples)
        await trained_until(log, chosen, version)
    held = [one.event for one in await toys.read(log, MEMORY) if isinstance(one.event, HintHeld)]
    assert [(one.turn_id, one.followed) for one in held] == [("taught", False), (accepted.turn_id, True)]


async def test_a_step_that_is_taken_again_rejects_no_hint_twice(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    chosen = settings(base, tmp_path, batch_samples=1, rehearsal_share=0.5)
    taught = replace(tiny.sample("taught", hinted=True), key_name="ann")
    hint_id = hint_id_of("policy", "ann", "keep it plain")
    rejected = [FollowedHint(hint_id=hint_id, gain_nats=2.0, accepted=False, sample_id="x")] * (CONTRADICTED_AFTER // 2)
    await Rehearsing(chosen, log, on_change=lambda: None).hold(plan(1), [taught])
    again = Rehearsing(chosen, log, on_change=lambda: None)
    await again.open([step(followed=rejected, version=2)], [])
    await again.ask(plan(2), step(followed=rejected, version=2))  # its checkpoint's folder is lost
    assert again.held == {hint_id}
    await again.ask(plan(3), step(followed=rejected, version=3))
    assert again.held == frozenset()


async def test_a_step_on_a_merged_hint_counts_though_the_process_that_planned_it_was_killed(
    base: Path, tmp_path: Path
) -> None:
    log = MemoryLog(MemoryBroker())
    chosen = settings(base, tmp_path, batch_samples=1, rehearsal_share=0.5)
    said_once = held_of(tiny.sample("taught", hinted=True), "policy", 0, 0)
    assert said_once is not None
    await log.append([merged_into(said_once, 0, 5)])
    steps: list[StepTaken] = []
    for version in range(1, MERGED_STEPS + 1):
        killed = Rehearsing(chosen, log, on_change=lambda: None)
        await killed.open(steps, [])
        await killed.merge(version - 1)
        assert killed.merging is not None
        then = Rehearsing(chosen, log, on_change=lambda: None)
        await then.open(steps, [plan(version)])
        steps.append(step(Rehearsed(hint_id=said_once.hint_id, open_nats=3.0, gain_nats=None), version=version))
        await then.ask(plan(version), steps[-1])
    await then.merge(MERGED_STEPS)
    assert then.merging is None


def kept(*names: str) -> tuple[HeldAnswer, ...]:
    return tuple(
        HeldAnswer(hint_id=f"hint {name}", prompt_ids=(1,), response_ids=(2, 3), temperature=1.0, logp_nats=-0.5)
        for name in names
    )


def test_the_gate_remembers_the_newest_answer_that_followed_each_hint() -> None:
    one, other = rehearsal("a"), rehearsal("b")
    other = replace(other, response_logprobs=(None, *other.response_logprobs[1:]))
    again = replace(rehearsal("again"), hint_id=one.hint_id)
    followed = [Rehearsed(hint_id=sample.hint_id or "", open_nats=0.01) for sample in (one, other)]
    memory = GateMemory().after([tiny.sample("x"), one, other], followed)
    assert [held.response_ids for held in memory.held] == [one.response_ids]  # of the other a log-prob is missing
    for open_nats, newest in ((0.3, one), (None, one), (0.0, again)):
        after = memory.after([again], [Rehearsed(hint_id=again.hint_id or "", open_nats=open_nats)])
        assert [held.response_ids for held in after.held] == [newest.response_ids]
    assert GateMemory.of(memory.plain()) == memory
    many = [replace(rehearsal(f"{n}"), hint_id=f"h{n}") for n in range(HELD_ANSWERS + 2)]
    full = memory.after(many, [Rehearsed(hint_id=one.hint_id or "", open_nats=0.0) for one in many])
    assert [held.hint_id for held in full.held] == [f"h{n}" for n in range(2, HELD_ANSWERS + 2)]


def test_an_answer_without_a_finite_log_prob_says_nothing_of_its_hint() -> None:
    [answer] = kept("a")
    assert answer.kept(AnswerLikelihood(logps=(-0.5, -1.5), entropy_nats=1.0)) == KeptHint(
        hint_id="hint a", lost_nats=0.5
    )
    assert answer.kept(AnswerLikelihood(logps=(-0.5, nan), entropy_nats=1.0)) is None


def test_the_gate_looks_in_turn_at_hints_that_are_held_and_not_in_the_batch() -> None:
    names = [chr(97 + n) for n in range(2 * LOOKED_AT + 2)]
    memory = GateMemory(held=kept(*names))
    held = {f"hint {name}" for name in names} - {"hint b"}
    in_batch = [replace(tiny.sample("x"), hint_id="hint a"), tiny.sample("y")]
    seen = [memory.to_look_at(held, in_batch, version=version) for version in (1, 2)]
    assert [len(answers) for answers in seen] == [LOOKED_AT] * 2
    assert {one.hint_id for answers in seen for one in answers} == held - {"hint a"}
    assert memory.to_look_at((), in_batch, version=1) == ()


def test_what_is_held_is_scored_before_a_version_is_published(base: Path) -> None:
    trainer = Trainer(base, TrainingSettings(learning_rate=1e-4))
    answers = [said(base, f"held {n}", follows=False) for n in range(4)]
    known = [
        HeldAnswer(
            hint_id=f"h{n}", prompt_ids=one.prompt_ids, response_ids=one.response_ids, temperature=1.0, logp_nats=-1.0
        )
        for n, one in enumerate(answers)
    ]
    trainer._carried = replace(trainer._carried, gate=GateMemory(held=tuple(known)))
    batch = [said(base, f"new {n}", follows=True, reward=(-1) ** n) for n in range(6)]
    held = [f"h{n}" for n in range(4)]
    found = trainer.update(batch, version=1, seed=1, gated=True, held=held).kept
    suffixes = [Suffix(one.prompt_ids, one.response_ids, 1.0) for one in known]
    logps = trainer._model.score(suffixes, weights=None, budget_tokens=999)
    assert {one.hint_id: one.lost_nats for one in found} == pytest.approx(
        {one.hint_id: -1.0 - float(logp_T.mean()) for one, logp_T in zip(known, logps, strict=True)}, abs=1e-4
    )


async def test_a_step_that_loses_a_held_hint_says_which(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MemoryLog(MemoryBroker())
    chosen = settings(base, tmp_path, batch_samples=1, rehearsal_share=0.5, learning_rate=1e-6)
    hint_id = hint_id_of("policy", "ann", "in verse")
    # As if by a policy that writes in verse without being told; the policy here, near its base, does not.
    followed = rehearsed(base, hint_id, 2.0)
    taught, beside, other = (said(base, name, follows=False, hint=name == "taught") for name in ("taught", "by", "new"))
    for version, samples in enumerate(([taught], [followed, replace(beside, reward=1, total_reward=1.0)], [other]), 1):
        await log.append(samples)
        events = await trained_until(log, chosen, version)
    steps = [event for event in events if isinstance(event, StepTaken)]
    assert [[one.hint_id for one in step.rehearsed] for step in steps] == [[], [hint_id], []]
    plain = Suffix(followed.prompt_ids, followed.response_ids, 1.0)
    [now_T] = model(base).score([plain], weights=None, budget_tokens=999)
    lost_nats = fmean(logp for logp in followed.response_logprobs if logp is not None) - float(now_T.mean())
    assert lost_nats > OPEN_NATS
    assert [step.kept for step in steps[:2]] == [(), ()]
    assert {one.hint_id: one.lost_nats for one in steps[2].kept} == pytest.approx({hint_id: lost_nats}, abs=1e-3)
    assert caplog.text.count("hints_lost") == 1
    assert "hints_lost policy=policy version=3 lost=1 looked_at=1 most_nats=0.8" in caplog.text


async def test_the_log_says_how_many_held_hints_a_step_lost_and_how_many_answers_are_to_rehearse(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = settings(base, tmp_path, batch_samples=1, rehearsal_share=0.5)
    rehearsing = Rehearsing(chosen, MemoryLog(MemoryBroker()), on_change=lambda: None)
    plan = plan_of(Batch(samples=(), offsets=()), 2)
    for name in "abc":
        await rehearsing.hold(plan, [replace(tiny.sample(name, hinted=True), hint=f"hint {name}")])
    nats = {"a": 0.25, "b": 0.75, "c": OPEN_NATS, "retired": 0.5}
    found = tuple(
        KeptHint(hint_id=hint_id_of("policy", None, f"hint {name}"), lost_nats=lost) for name, lost in nats.items()
    )
    await rehearsing.ask(plan, one_memory.step(2, kept=found[2:3]))
    assert "hints_lost" not in caplog.text
    await rehearsing.ask(plan, one_memory.step(3, kept=found))
    said = "hints_lost policy=policy version=3 lost=3 looked_at=4 most_nats=0.750 asked_for_next_batch=2"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [said]
