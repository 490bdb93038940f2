"""Rehearsals of held hints: beside other samples in a batch, and the whole way round on a log."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from clawstream.config import TrainingSettings
from clawstream.events import (
    AnswerRefreshed,
    BatchPlanned,
    FinishReason,
    HintHeld,
    HintRetired,
    RefusalReason,
    RehearsalAsked,
    Retired,
    SampleAssembled,
    SampleRefused,
    StepTaken,
    VersionSpan,
    hint_id_of,
)
from clawstream.refresh.answering import rehearsed
from clawstream.stream.topics import MEMORY
from clawstream.training.batches.choosing import BatchRules, rehearsals_beside
from clawstream.training.batches.planning import Batch, Batcher, DropReason
from clawstream.training.rehearsing import Rehearsing
from clawstream.training.step.losses import Suffix
from clawstream.training.step.trainer import Trainer
from clawstream.training.torch_model import TorchModel
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.fakes.scripted_engine import ScriptedAnswer, ScriptedBackend
from tests.parts.training import tiny
from tests.parts.training.batches.test_batches import of, plan_of
from tests.parts.training.batches.test_refreshed_on_logs import Small, stages_from_turns_to_answers
from tests.parts.training.test_loop import settings, trained_until
from tests.sessions import ANSWERS, SAMPLES, Session, assistant, user
from tests.unit.stream import toys

RULES = BatchRules(policy_id="policy", batch_samples=3, max_wait_ms=1000, rehearses=True)


def rehearsal(name: str, *, version: int = 0) -> SampleAssembled:
    kept = tiny.sample(name, reward=None, hinted=True, version=version)
    return replace(kept, judge="nobody", refreshed_id=f"answer {name}", hint_id=f"hint {name}")


@pytest.mark.parametrize(
    ("share", "fresh", "beside"),
    [
        (0.25, 0, 0),
        (0.25, 1, 1),
        (0.25, 3, 1),
        (0.25, 16, 6),
        (0.25, 12, 4),
        (1 / 3, 16, 8),
        (1 / 3, 1, 1),
        (0.0, 16, 0),
    ],
)
def test_rehearsals_come_on_top_of_other_samples_and_are_at_least_their_share_of_the_batch(
    share: float, fresh: int, beside: int
) -> None:
    assert rehearsals_beside(fresh, share=share) == beside


def test_a_batch_has_its_samples_and_the_newest_rehearsals_on_top_up_to_half_of_it() -> None:
    batcher = Batcher(RULES)
    for name in ("old", "1", "2", "3"):
        assert batcher.receive(of(rehearsal(name))) is None
    for name in "abc":
        batcher.receive(of(tiny.sample(name)))
    batch = batcher.due(parent_version=0, now_ms=0)
    assert batch is not None
    assert [sample.turn_id for sample in batch.samples] == ["a", "b", "c", "1", "2", "3"]
    idle = Batcher(replace(RULES, rehearses=False))
    for sample in (rehearsal("r"), *map(tiny.sample, "abc")):
        idle.receive(of(sample))
    batch = idle.due(parent_version=0, now_ms=0)
    assert batch is not None
    assert [sample.turn_id for sample in batch.samples] == ["a", "b", "c"]


def test_rehearsals_alone_make_no_batch_however_long_they_wait() -> None:
    batcher = Batcher(RULES)
    for number in range(5):
        batcher.receive(of(rehearsal(f"r{number}")))
    assert batcher.due_ms is None
    assert batcher.due(parent_version=0, now_ms=10**9) is None
    batcher.receive(of(tiny.sample("a")))
    batch = batcher.due(parent_version=0, now_ms=10**9)
    assert batch is not None
    assert [sample.turn_id for sample in batch.samples] == ["a", "r4"]


def test_a_rehearsal_by_a_policy_of_yesterday_is_dropped() -> None:
    batcher = Batcher(RULES)
    batcher.receive(of(rehearsal("old", version=1)))
    batcher.receive(of(rehearsal("last", version=2)))
    for name in "abc":
        batcher.receive(of(tiny.sample(name)))
    batch = batcher.due(parent_version=3, now_ms=0)
    assert batch is not None
    assert [sample.turn_id for sample in batch.samples] == ["a", "b", "c", "last"]
    assert batcher.dropped == {DropReason.OVERTAKEN: 1}


def test_a_rehearsal_of_a_hint_that_is_held_no_more_is_dropped_whether_it_waits_or_comes_later() -> None:
    batcher = Batcher(RULES)
    for name in ("gone", "kept"):
        batcher.receive(of(rehearsal(name)))
    assert batcher.due(parent_version=0, now_ms=0, held={"hint kept"}) is None
    assert batcher.dropped == {DropReason.RETIRED: 1}
    for sample in (replace(rehearsal("on its way"), hint_id="hint gone"), *map(tiny.sample, "abc")):
        batcher.receive(of(sample))
    batch = batcher.due(parent_version=0, now_ms=0, held={"hint kept"})
    assert batch is not None
    assert [sample.turn_id for sample in batch.samples] == ["a", "b", "c", "kept"]


@pytest.mark.parametrize("num_waiting", [0, 1, 8, 15, 16, 17])
def test_as_many_rehearsals_as_wait_are_taken_up_to_as_many_as_there_are_samples(num_waiting: int) -> None:
    batcher = Batcher(BatchRules(policy_id="policy", batch_samples=16, rehearses=True))
    for number in range(num_waiting):
        batcher.receive(of(rehearsal(f"r{number}")))
    for number in range(16):
        batcher.receive(of(tiny.sample(f"s{number}")))
    batch = batcher.due(parent_version=0, now_ms=0)
    assert batch is not None
    assert sum(sample.hint_id is not None for sample in batch.samples) == min(num_waiting, 16)


def test_a_planned_rehearsal_is_found_again_after_a_restart() -> None:
    batcher, log = (
        Batcher(RULES),
        [of(rehearsal("r"), 0), *(of(tiny.sample(name), n) for n, name in enumerate("abc", 1))],
    )
    for arrival in log:
        batcher.receive(arrival)
    batch = batcher.due(parent_version=0, now_ms=0)
    assert batch is not None
    again = Batcher(RULES, [plan_of(batch, 1)])
    for arrival in log:
        again.receive(arrival)
    pending = again.pending()
    assert pending is not None
    assert pending[1] == batch.samples


def test_a_step_says_how_open_the_hints_were_that_it_rehearsed(base: Path) -> None:
    trainer = Trainer(base, TrainingSettings(method="combined", learning_rate=1e-3))
    one = rehearsal("r")
    summary = trainer.update([tiny.sample("a"), one], version=1, seed=1)
    [found] = summary.rehearsed
    asked = Suffix(one.hinted_prompt_ids or (), one.response_ids, one.temperature)
    [taught_T] = TorchModel.load(base).score([asked], weights=None, budget_tokens=999)
    gaps = [sampled - float(logp) for sampled, logp in zip(one.response_logprobs, taught_T, strict=True) if sampled]
    assert found.hint_id == "hint r"
    assert found.open_nats == pytest.approx(sum(gaps) / len(gaps), abs=1e-4)


def test_what_was_forgotten_does_not_start_the_learning_rate_again(base: Path) -> None:
    said, again = tiny.sample("a", reward=None, hinted=True), rehearsal("r")
    seen = {}
    for name, samples in {"said": [said], "both": [again, said, again], "rehearsed": [again]}.items():
        trainer = Trainer(base, TrainingSettings(learning_rate=1e-6))
        assert trainer.update(samples, version=1, seed=1).mean_gap_nats is not None, "people see the gap of all"
        seen[name] = trainer._carried.schedule.last_gaps
    assert seen["both"] == pytest.approx(seen["said"], abs=1e-4)
    assert (len(seen["said"]), seen["rehearsed"]) == (1, ())


@pytest.mark.parametrize("given", [{"method": "binary"}, {"method": "opd", "teacher": "http://teacher"}])
def test_nothing_is_rehearsed_where_no_hint_is_learned_from_or_an_engine_teaches(given: Mapping[str, str]) -> None:
    training = TrainingSettings.model_validate(given)
    assert (training.rehearsed_share, training.refreshes) == (0.0, False)
    assert TrainingSettings().rehearsed_share == pytest.approx(1 / 3)


async def assembled(log: MemoryLog) -> list[SampleAssembled]:
    return [one.event for one in await toys.read(log, SAMPLES) if isinstance(one.event, SampleAssembled)]


async def test_a_hint_that_was_trained_on_is_rehearsed_in_the_next_batch(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    chosen = settings(base, tmp_path, batch_samples=1, gate=False, rehearsal_share=0.5)
    engine = ScriptedBackend(script=lambda _: ScriptedAnswer(token_ids=(7, 8, 9, 1)), version="1")

    async def complains(name: str) -> None:
        session = Session(
            name, renderer=Small(), sampled=lambda text: tuple(byte % tiny.VOCABULARY for byte in text.encode())
        )
        session.ask([user("2+2?")], "**4**")
        session.ask([user("2+2?"), assistant("**4**"), user("no bold")], "4")
        await log.append(session.written)

    async with stages_from_turns_to_answers(log, engine):
        await complains("first")
        await trained_until(log, chosen, 1)

        async def came() -> bool:
            return any(sample.hint_id is not None for sample in await assembled(log))

        await toys.until(came)
        await complains("second")
        said = await trained_until(log, chosen, 2)

    samples = await assembled(log)
    answers = [one.event for one in await toys.read(log, ANSWERS)]
    held = [one.event for one in await toys.read(log, MEMORY)]
    assert isinstance(held[0], HintHeld)
    own = next(sample for sample in samples if sample.sample_id == held[0].sample_id)
    again = next(sample for sample in samples if sample.hint_id is not None)
    assert (own.hint_id, again.hint_id, again.hint) == (None, held[0].hint_id, own.hint)
    [ask, *_] = [event for event in answers if isinstance(event, RehearsalAsked)]
    [answer, *_] = [event for event in answers if isinstance(event, AnswerRefreshed)]
    assert (ask.number, answer.number, again.refreshed_id) == (-1, -1, answer.event_id)
    assert (again.prompt_ids, again.hinted_prompt_ids) == (own.prompt_ids, own.hinted_prompt_ids)
    assert (again.response_ids, again.total_reward, again.reward) == ((7, 8, 9, 1), None, None)
    plans = [event for event in said if isinstance(event, BatchPlanned)]
    assert again.sample_id in plans[1].sample_ids
    steps = [event for event in said if isinstance(event, StepTaken)]
    assert [one.hint_id for one in steps[-1].rehearsed] == [again.hint_id]
    assert sum(sample.hint_id is None and sample.turn_id == own.turn_id for sample in samples) == 1


async def test_a_hint_that_a_person_retires_is_rehearsed_no_more(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    chosen = settings(base, tmp_path, batch_samples=1, gate=False)
    await log.append([tiny.sample("a", hinted=True)])
    await trained_until(log, chosen, 1)
    [held] = [one.event for one in await toys.read(log, MEMORY)]
    assert isinstance(held, HintHeld)
    await log.append([replace(rehearsal("a", version=1), hint_id=held.hint_id)])
    await log.append([HintRetired(policy_id="policy", hint_id=held.hint_id, reason=Retired.ASKED, retired_at_ms=1)])
    await log.append([tiny.sample("b")])
    said = await trained_until(log, chosen, 2)
    [_, plan] = [event for event in said if isinstance(event, BatchPlanned)]
    assert plan.sample_ids == (tiny.sample("b").sample_id,)
    asks = [one.event for one in await toys.read(log, ANSWERS)]
    assert [ask.number for ask in asks if isinstance(ask, RehearsalAsked)] == [-1]


async def test_a_hint_that_is_retired_while_the_trainer_starts_or_runs_is_asked_for_no_more(
    base: Path, tmp_path: Path
) -> None:
    log = MemoryLog(MemoryBroker())
    chosen = settings(base, tmp_path, batch_samples=1, rehearsal_share=0.5)
    plans = [plan_of(Batch(samples=(), offsets=()), version) for version in range(1, 9)]

    async def holds(rehearsing: Rehearsing, name: str) -> str:
        await rehearsing.hold(plans[0], [replace(tiny.sample(name, hinted=True), hint=f"hint {name}")])
        return hint_id_of("policy", None, f"hint {name}")

    async def retires(hint_id: str) -> None:
        await log.append(
            [HintRetired(policy_id="policy", hint_id=hint_id, reason=Retired.ASKED, retired_at_ms=len(hint_id))]
        )

    first = Rehearsing(chosen, log, on_change=lambda: None)
    a, b = await holds(first, "a"), await holds(first, "b")
    second = Rehearsing(chosen, log, on_change=lambda: None)
    await second.open([], [])
    await retires(a)  # after it has read what is held, and before it follows
    following = asyncio.create_task(second.follow())
    await retires(b)

    async def asks_nothing() -> bool:
        before = len(await toys.read(log, ANSWERS))
        await second.ask(plans.pop(), None)
        return len(await toys.read(log, ANSWERS)) == before

    await toys.until(asks_nothing)
    following.cancel()


def test_an_answer_that_did_not_end_rehearses_nothing_and_says_why() -> None:
    asked = RehearsalAsked(
        session_id="s", turn_id="t", number=-1, policy_id="policy", hint_id="held", hint="no bold",
        hint_by_person=False, prompt_ids=(1,), hinted_prompt_ids=(1, 2),
        sampling=replace(tiny.sample("a").sampling, limit_by_client=False),  # the policy ran into its own limit
        num_earlier_turns=0, asked_at_ms=1,
    )  # fmt: skip
    whole = AnswerRefreshed(
        session_id="s", turn_id="t", number=-1, policy_id="policy", sampling=asked.sampling,
        versions=(VersionSpan(policy_version=1, num_tokens=2),), message=b'{"role":"assistant","content":"4"}',
        output_ids=(3, 4), output_logprobs=(-0.5, -0.25), finish_reason=FinishReason.STOP, error=None, answered_at_ms=2,
    )  # fmt: skip
    kept, cut = rehearsed(whole, asked), rehearsed(replace(whole, finish_reason=FinishReason.LENGTH), asked)
    assert isinstance(kept, SampleAssembled)
    assert (kept.hint_id, kept.trained, kept.cut, kept.total_reward) == ("held", (1, 1), False, None)
    assert isinstance(cut, SampleRefused)
    assert (cut.reason, cut.refreshed_id) == (RefusalReason.TRUNCATED, whole.event_id)


def test_a_contrast_moves_only_what_the_hint_changes_in_the_base(base: Path) -> None:
    """Where the teacher says the same with the hint as without, its gap is 0, however far the policy is from it."""
    kept = tiny.sample("a", reward=None, hinted=True)
    aside = replace(kept, hinted_prompt_ids=kept.prompt_ids)  # a hint that changes nothing
    moved = {}
    for teacher in ("contrast", "reference"):
        training = TrainingSettings(method="combined", teacher=teacher, w_topk=0.0, kl=0.0, learning_rate=1e-2)
        trainer = Trainer(base, training)
        trainer.update([tiny.sample("b")], version=1, seed=1)  # the policy leaves its base
        step = trainer.update([aside], version=2, seed=2)
        moved[teacher] = step.grad_norm
    assert moved["contrast"] == pytest.approx(0.0, abs=1e-6)
    assert (moved["reference"] or 0.0) > 1e-3


def test_the_gap_that_a_step_reports_is_from_the_policy_to_its_teacher_by_contrast_too(base: Path) -> None:
    kept = tiny.sample("a", hinted=True)
    gaps = [
        Trainer(base, TrainingSettings(teacher=teacher, learning_rate=1e-3))
        .update([kept], version=1, seed=1)
        .mean_gap_nats
        for teacher in ("contrast", "reference")
    ]
    assert gaps[0] == gaps[1]


@pytest.mark.parametrize(
    ("given", "teacher"),
    [
        ({}, "contrast"), ({"w_topk": 0.0}, "reference"), ({"method": "opd"}, "reference"),
        ({"method": "topk"}, "reference"), ({"teacher": "reference"}, "reference"),
        ({"recipe": "openclaw-rl"}, "reference"),
        ({"recipe": "openclaw-rl", "method": "binary"}, "reference"),
    ],
)  # fmt: skip
def test_hints_are_weighed_by_contrast_where_the_divergence_bounds_it(
    given: Mapping[str, object], teacher: str
) -> None:
    training = TrainingSettings.model_validate(given)
    assert training.taught_by == teacher
    assert training.method == "binary" or training.resolved.teacher == teacher
    assert TrainingSettings.model_validate_json(training.resolved.model_dump_json()).taught_by == teacher
