"""One correction at once: its own answers, a step of its own, and how far that step may go."""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from clawstream.config import JudgeSettings, TrainingSettings
from clawstream.events import BatchPlanned, RehearsalAsked, SampleAssembled, hint_id_of
from clawstream.inference.sglang import SglangEngine
from clawstream.judging.stage import judging_stage
from clawstream.refresh.answering import Refresher
from clawstream.refresh.stage import refresh_stage
from clawstream.samples.joining import SampleRules
from clawstream.samples.stage import samples_stage
from clawstream.training.batches.choosing import (
    ANSWERED_WITHIN_MS,
    CORRECTION_ANSWERS,
    ENOUGH_ANSWERS,
    BatchRules,
)
from clawstream.training.batches.memory import HintMemory
from clawstream.training.batches.planning import Batch, Batcher
from clawstream.training.rehearsing import CORRECTIONS_AT_ONCE, Rehearsing
from clawstream.training.step.trainer import Trainer
from clawstream.turns.stage import turns_stage
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.fakes.scripted_engine import ScriptedAnswer, ScriptedBackend, serving
from tests.flow import Oracle
from tests.parts.training import tiny
from tests.parts.training.test_batches import of, plan_of
from tests.parts.training.test_loop import settings, trained_until
from tests.parts.training.test_refreshed_on_logs import Small
from tests.sessions import ANSWERS, Session, assistant, user
from tests.unit.refresh.anew import HINT
from tests.unit.stream import toys

RULES = BatchRules(policy_id="policy", batch_samples=16, max_wait_ms=10**6, at_once=True, rehearsal_share=0.25)
OWN = hint_id_of("policy", None, "keep it plain")


def said(name: str) -> SampleAssembled:
    return tiny.sample(name, reward=-1, hinted=True)


def rehearsal(name: str, hint_id: str = OWN) -> SampleAssembled:
    kept = tiny.sample(name, reward=None, hinted=True)
    return replace(kept, judge="nobody", refreshed_id=f"answer {name}", hint_id=hint_id)


def batcher_with(*samples: SampleAssembled) -> Batcher:
    batcher = Batcher(RULES)
    for sample in samples:
        assert batcher.receive(of(sample)) is None
    return batcher


def names(batch: Batch | None) -> list[str] | None:
    return None if batch is None else [sample.turn_id for sample in batch.samples]


@pytest.mark.parametrize("num_answers", [0, ENOUGH_ANSWERS - 1, ENOUGH_ANSWERS, CORRECTION_ANSWERS])
def test_a_correction_is_due_once_its_hint_has_enough_answers_of_its_own(num_answers: int) -> None:
    own = [f"own {number}" for number in range(num_answers)]
    batcher = batcher_with(said("a"), *map(rehearsal, own), *(rehearsal(f"past {n}", "another") for n in range(20)))
    batch = batcher.due(parent_version=0, now_ms=1)
    if num_answers < ENOUGH_ANSWERS:
        assert batch is None
        return
    assert names(batch) is not None
    taken = names(batch) or []
    assert taken[: 1 + num_answers] == ["a", *own]
    past = taken[1 + num_answers :]
    assert len(past) == -(-(1 + num_answers) // 3), "a quarter of the batch is of the past"


def test_a_correction_that_is_not_answered_in_time_is_trained_on_as_it_is() -> None:
    batcher = batcher_with(said("a"), rehearsal("own"))
    assert batcher.due_ms == ANSWERED_WITHIN_MS
    assert batcher.due(parent_version=0, now_ms=ANSWERED_WITHIN_MS - 1) is None
    assert names(batcher.due(parent_version=0, now_ms=ANSWERED_WITHIN_MS)) == ["a", "own"]


def test_praise_makes_no_step_and_comes_along_with_the_next_correction() -> None:
    batcher = batcher_with(tiny.sample("praise"))
    assert batcher.due(parent_version=0, now_ms=ANSWERED_WITHIN_MS) is None
    for sample in (said("a"), *(rehearsal(f"own {number}") for number in range(ENOUGH_ANSWERS))):
        batcher.receive(of(sample))
    assert (names(batcher.due(parent_version=0, now_ms=1)) or [])[:2] == ["praise", "a"]


def test_a_full_batch_does_not_wait_for_the_answers_to_a_correction_and_leaves_it_out() -> None:
    batcher = batcher_with(said("a"), *(tiny.sample(f"praise {number}") for number in range(16)))
    assert names(batcher.due(parent_version=0, now_ms=1)) == [f"praise {number}" for number in range(16)]


def test_where_steps_are_taken_by_the_batch_a_correction_waits_like_all_others() -> None:
    batcher = Batcher(replace(RULES, at_once=False))
    for sample in (said("a"), *(rehearsal(f"own {number}") for number in range(CORRECTION_ANSWERS))):
        batcher.receive(of(sample))
    assert batcher.corrections == ()
    assert batcher.due(parent_version=0, now_ms=ANSWERED_WITHIN_MS) is None


def holding(*samples: SampleAssembled) -> HintMemory:
    memory = HintMemory()
    for number, sample in enumerate(samples, 1):
        for event in memory.to_hold(plan_of(Batch(samples=(), offsets=()), number), [sample], now_ms=number):
            memory.learn(event)
    return memory


def test_a_correction_is_tried_on_its_own_prompt_and_on_others_of_the_same_key_in_turn() -> None:
    others = [replace(said(name), hint=f"hint {name}", key_name=key) for name, key in (("b", None), ("c", "another's"))]
    asks = holding(*others).to_correct(said("a"), 4, now_ms=9)
    assert [ask.turn_id for ask in asks] == ["a", "b", "a", "b"]
    assert {ask.hint for ask in asks} == {"keep it plain"}
    assert {ask.hint_id for ask in asks} == {OWN}
    own_hint = (said("a").hinted_prompt_ids or ())[len(said("a").prompt_ids) :]
    for ask, sample in zip(asks, [said("a"), said("b")], strict=False):
        assert ask.prompt_ids == sample.prompt_ids
        assert ask.hinted_prompt_ids == (*sample.prompt_ids, *own_hint)
    assert len({(ask.turn_id, ask.number) for ask in asks}) == len({ask.session_id for ask in asks}) == 4
    assert all(ask.number < 0 for ask in asks)
    assert holding(*others).to_correct(said("a"), 4, now_ms=9) == asks


def test_a_hint_goes_to_the_place_of_the_other_prompts_own_hint() -> None:
    plain = said("b")
    end, own = plain.prompt_ids[-3:], (91, 92)  # the hint stands before what ends the message
    within = replace(plain, hint="be brief", hinted_prompt_ids=(*plain.prompt_ids[:-3], *own, *end))
    merged = replace(said("c"), hint="in full", hinted_prompt_ids=(*said("c").prompt_ids[:-1], 93, 94))
    asks = holding(within, merged).to_correct(said("a"), 2, now_ms=9)
    added = (said("a").hinted_prompt_ids or ())[len(said("a").prompt_ids) :]
    assert [ask.turn_id for ask in asks] == ["a", "b"], "a hint whose tokens ran into the prompt's has no place"
    assert asks[1].hinted_prompt_ids == (*plain.prompt_ids[:-3], *added, *end)


@pytest.mark.parametrize(
    "sample", [rehearsal("r"), replace(said("a"), sampling=replace(said("a").sampling, temperature=0.0))]
)
def test_nothing_is_asked_of_a_hint_that_cannot_be_rehearsed(sample: SampleAssembled) -> None:
    assert HintMemory().to_correct(sample, 4, now_ms=1) == []


async def test_the_answers_to_a_few_corrections_are_asked_for_at_a_time_and_once(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    rehearsing = Rehearsing(settings(base, tmp_path, cadence="correction"), log)
    waiting = [said(f"t{number}") for number in range(CORRECTIONS_AT_ONCE + 2)]

    async def asked() -> list[str]:
        await rehearsing.ask_at_once(waiting)
        events = [one.event for one in await toys.read(log, ANSWERS)]
        return [event.turn_id for event in events if isinstance(event, RehearsalAsked)]

    first = await asked()
    assert sorted(set(first)) == [f"t{number}" for number in range(CORRECTIONS_AT_ONCE)]
    assert len(first) == CORRECTIONS_AT_ONCE * CORRECTION_ANSWERS
    assert await asked() == first
    del waiting[0]
    assert sorted({*await asked()} - {*first}) == [f"t{CORRECTIONS_AT_ONCE}"]


async def test_one_complaint_is_learned_from_before_a_batch_is_full(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    chosen = settings(base, tmp_path, batch_samples=16, gate=False, cadence="correction")
    engine = ScriptedBackend(script=lambda _: ScriptedAnswer(token_ids=(7, 8, 9, 1)), version="0")
    session = Session("s", renderer=Small(), sampled=lambda text: tuple(b % tiny.VOCABULARY for b in text.encode()))
    session.ask([user("2+2?")], "**4**")
    session.ask([user("2+2?"), assistant("**4**"), user("no bold")], "4")
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(engine))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        policy = Refresher([SglangEngine(http, url)], Small(), "policy")
        for stage in (
            turns_stage(),
            judging_stage(JudgeSettings(votes=1), Oracle(HINT)),
            samples_stage(SampleRules(Small())),
            refresh_stage(policy, "policy", answers_per_hint=1),
        ):
            await stack.enter_async_context(toys.running(stage, log))
        await log.append(session.written)
        events = await trained_until(log, chosen, 1)
    [plan] = [event for event in events if isinstance(event, BatchPlanned)]
    assert len(plan.sample_ids) >= 1 + ENOUGH_ANSWERS


@pytest.mark.parametrize(("rate", "num_steps"), [(1e-5, 4), (0.3, 2)])
def test_passes_over_a_correction_end_once_the_policy_moved_far_enough(base: Path, rate: float, num_steps: int) -> None:
    trainer = Trainer(base, TrainingSettings(cadence="correction", learning_rate=rate))
    trainer.update([said("a")], version=1, seed=1)
    steps = {int(state["step"]) for state in trainer._optimizer.state.values()}
    assert steps <= {num_steps, num_steps - 1}
    assert max(steps) < 4 or rate < 1e-3


@pytest.mark.parametrize(
    "given", [{"method": "binary"}, {"method": "stepwise"}, {"w_opd": 0.0}, {"method": "opd", "teacher": "engine"}]
)
def test_nothing_is_corrected_at_once_where_no_hint_is_learned_from(given: Mapping[str, object]) -> None:
    with pytest.raises(ValueError, match="cadence = 'correction' trains on each hint at once"):
        TrainingSettings.model_validate({**given, "cadence": "correction"})


def test_a_correction_is_passed_over_four_times_unless_told_otherwise() -> None:
    assert TrainingSettings().epochs == 1
    assert TrainingSettings(cadence="correction").epochs == 4
    assert TrainingSettings(cadence="correction", epochs=2).epochs == 2
    assert TrainingSettings(cadence="correction").refreshes
