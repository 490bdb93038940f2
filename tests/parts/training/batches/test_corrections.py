"""One correction at once: its own answers, a step of its own, and how far that step may go."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clawstream.config import Settings, TrainingSettings
from clawstream.events import (
    BatchPlanned,
    RehearsalAsked,
    SampleAssembled,
    SampleRefused,
    hint_id_of,
)
from clawstream.refresh.asking import NOTHING, Known, observe
from clawstream.training.batches.choosing import (
    ANSWERED_WITHIN_MS,
    CORRECTION_ANSWERS,
    ENOUGH_ANSWERS,
    MAX_OPEN_CORRECTIONS,
    BatchRules,
)
from clawstream.training.batches.memory import HintMemory
from clawstream.training.batches.planning import Batch, Batcher, DropReason
from clawstream.training.publishing import GateMemory
from clawstream.training.step.losses import LogProbs, Objective, policy_loss
from clawstream.training.step.trainer import Trainer
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.fakes.scripted_engine import ScriptedAnswer, ScriptedBackend
from tests.parts.training import tiny
from tests.parts.training.batches.test_batches import of, plan_of
from tests.parts.training.batches.test_refreshed_on_logs import Small, stages_from_turns_to_answers
from tests.parts.training.test_loop import settings, trained_until
from tests.parts.training.test_rehearsals import assembled
from tests.sessions import ANSWERS, SAMPLES, Session, assistant, user
from tests.unit.stream import toys

RULES = BatchRules(policy_id="policy", batch_samples=16, max_wait_ms=10**6, corrects=True, rehearses=True)
OWN = hint_id_of("policy", None, "keep it plain")


def said(name: str) -> SampleAssembled:
    return tiny.sample(name, reward=-1, hinted=True)


def said_so(name: str, hint: str) -> SampleAssembled:
    return replace(said(name), hint=hint)


def rehearsal(name: str, hint_id: str = OWN) -> SampleAssembled:
    kept = tiny.sample(name, reward=None, hinted=True)
    return replace(kept, judge="nobody", refreshed_id=f"answer {name}", hint_id=hint_id)


def batcher_with(*samples: SampleAssembled, asked_ms: int = 0) -> Batcher:
    """A batcher with these samples, whose corrections are asked about."""
    batcher = Batcher(RULES)
    for sample in samples:
        assert batcher.receive(of(sample)) is None
    batcher.corrected(asked_of(batcher.to_correct()), asked_ms)
    return batcher


def asked_of(corrections: Iterable[SampleAssembled]) -> dict[str, frozenset[str]]:
    """The sessions in which these corrections' answers are asked for."""
    return {
        one.sample_id: frozenset(f"{one.turn_id} asked {n}" for n in range(CORRECTION_ANSWERS)) for one in corrections
    }


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
    assert len(past) == 1 + num_answers, "half of the batch is of the past"


@pytest.mark.parametrize("num_answers", [0, 4, 7])
def test_a_correction_waits_for_no_answer_that_was_refused(num_answers: int) -> None:
    own = [f"own {number}" for number in range(num_answers)]
    batcher = batcher_with(said("a"), *map(rehearsal, own))
    for number in range(CORRECTION_ANSWERS):
        batcher.refused(f"{'a' if number < CORRECTION_ANSWERS - num_answers - 1 else 'another'} asked {number}")
    assert batcher.due(parent_version=0, now_ms=1) is None, "one answer is still to come"
    batcher.refused(f"a asked {CORRECTION_ANSWERS - 1}")
    assert names(batcher.due(parent_version=0, now_ms=1)) == ["a", *own]


def test_refusals_that_are_read_again_before_the_same_answers_are_asked_for_count() -> None:
    batcher = Batcher(RULES)
    for number in range(CORRECTION_ANSWERS):
        batcher.refused(f"a asked {number}")
    batcher.receive(of(said("a")))
    batcher.corrected(asked_of(batcher.to_correct()), 0)
    assert names(batcher.due(parent_version=0, now_ms=1)) == ["a"]


def test_refusals_are_known_until_the_correction_that_they_are_of_is_planned() -> None:
    batcher = batcher_with(said("a"), said_so("b", "in bold"), *(rehearsal(f"own {n}") for n in range(ENOUGH_ANSWERS)))
    for number in range(CORRECTION_ANSWERS):
        batcher.refused(f"b asked {number}")
        batcher.refused(f"rehearsal {number}")
    batch = batcher.due(parent_version=0, now_ms=1)
    assert (names(batch) or [])[:2] == ["a", "b"]
    alone = batcher_with(said("a"), said_so("b", "in bold"), *(rehearsal(f"own {n}") for n in range(ENOUGH_ANSWERS)))
    for number in range(CORRECTION_ANSWERS - 1):
        alone.refused(f"b asked {number}")
    first = alone.due(parent_version=0, now_ms=1)
    assert first is not None
    alone.plan(plan_of(first, 1))
    alone.executed(plan_of(first, 1))
    assert alone.due(parent_version=1, now_ms=1) is None
    alone.refused(f"b asked {CORRECTION_ANSWERS - 1}")
    assert names(alone.due(parent_version=1, now_ms=1)) == ["b"]


def test_a_correction_that_is_not_answered_in_time_is_trained_on_as_it_is() -> None:
    batcher = batcher_with(said("a"), rehearsal("own"), asked_ms=7)
    assert batcher.due_ms == 7 + ANSWERED_WITHIN_MS
    assert batcher.due(parent_version=0, now_ms=6 + ANSWERED_WITHIN_MS) is None
    assert names(batcher.due(parent_version=0, now_ms=7 + ANSWERED_WITHIN_MS)) == ["a", "own"]


def test_what_was_not_asked_about_is_not_due_however_long_it_waits() -> None:
    many = [said_so(f"t{number}", f"hint {number}") for number in range(MAX_OPEN_CORRECTIONS + 2)]
    batcher = batcher_with(*many)
    assert batcher.to_correct() == ()
    taken = names(batcher.due(parent_version=0, now_ms=ANSWERED_WITHIN_MS))
    assert taken == [f"t{number}" for number in range(MAX_OPEN_CORRECTIONS)]


def test_a_correction_leaves_the_answers_of_another_that_still_waits() -> None:
    own = [f"own {number}" for number in range(ENOUGH_ANSWERS)]
    others = [rehearsal(f"other {number}", hint_id_of("policy", None, "in bold")) for number in range(5)]
    batcher = batcher_with(said("a"), said_so("b", "in bold"), *map(rehearsal, own), *others)
    batch = batcher.due(parent_version=0, now_ms=1)
    assert names(batch) == ["a", *own]
    assert batch is not None
    batcher.plan(plan_of(batch, 1))
    batcher.executed(plan_of(batch, 1))
    assert names(batcher.due(parent_version=1, now_ms=ANSWERED_WITHIN_MS)) == ["b", *(f"other {n}" for n in range(5))]


def test_the_answers_to_a_hint_that_is_said_no_more_are_trained_on_by_nobody() -> None:
    batcher = batcher_with(said("a"), *(rehearsal(f"own {number}") for number in range(3)))
    other = replace(said("a"), hint="in bold", num_feedback=1)
    assert batcher.receive(of(other)) is None
    assert batcher.receive(of(rehearsal("late"))) is DropReason.SUPERSEDED
    assert batcher.to_correct() == (other,)
    batcher.corrected(asked_of([other]), 5)
    assert names(batcher.due(parent_version=0, now_ms=5 + ANSWERED_WITHIN_MS)) == ["a"]
    again = batcher_with(said("a"), *(rehearsal(f"own {number}") for number in range(3)))
    assert again.receive(of(replace(said("a"), num_feedback=1))) is None, "the same words with a thumb beside them"
    again.corrected(asked_of(again.to_correct()), 0)
    assert names(again.due(parent_version=0, now_ms=ANSWERED_WITHIN_MS)) == ["a", "own 0", "own 1", "own 2"]


def test_a_correction_that_is_replaced_while_its_answers_are_asked_for_is_passed_over() -> None:
    batcher = Batcher(RULES)
    batcher.receive(of(said("a")))
    asked = batcher.to_correct()
    newer = replace(said("a"), hint="in bold", num_feedback=1)
    batcher.receive(of(newer))
    batcher.corrected(asked_of(asked), 1)
    assert batcher.to_correct() == (newer,)


def test_a_hint_that_is_said_again_after_it_was_taken_back_has_its_answers_again() -> None:
    batcher = batcher_with(said("a"))
    assert batcher.receive(of(replace(said("a"), hint="in bold", num_feedback=1))) is None
    assert batcher.receive(of(rehearsal("early"))) is DropReason.SUPERSEDED
    assert batcher.receive(of(said("b"))) is None
    assert batcher.receive(of(rehearsal("own"))) is None


def test_the_answers_to_a_correction_that_waits_are_kept_however_old() -> None:
    own = [f"own {number}" for number in range(ENOUGH_ANSWERS)]
    batcher = batcher_with(said("a"), *map(rehearsal, own), rehearsal("past", "another"))
    assert names(batcher.due(parent_version=2, now_ms=1)) == ["a", *own]


def test_the_answers_to_a_correction_that_waits_are_kept_before_its_hint_is_held() -> None:
    own = [f"own {number}" for number in range(ENOUGH_ANSWERS)]
    batcher = batcher_with(said("a"), *map(rehearsal, own), rehearsal("past", "another"))
    assert names(batcher.due(parent_version=0, now_ms=1, held=())) == ["a", *own]


def test_praise_waits_for_a_batch_of_its_own() -> None:
    batcher = batcher_with(tiny.sample("praise"), said("a"), *(rehearsal(f"own {n}") for n in range(ENOUGH_ANSWERS)))
    assert "praise" not in (names(batcher.due(parent_version=0, now_ms=1)) or [])
    alone = batcher_with(tiny.sample("praise"))
    assert alone.due(parent_version=0, now_ms=ANSWERED_WITHIN_MS) is None
    assert alone.due_ms == RULES.max_wait_ms
    assert names(alone.due(parent_version=0, now_ms=RULES.max_wait_ms)) == ["praise"]


def test_a_full_batch_leaves_out_a_correction_that_waits_and_its_answers() -> None:
    praise = [f"praise {number}" for number in range(16)]
    batcher = batcher_with(said("a"), rehearsal("own"), rehearsal("past", "another"), *map(tiny.sample, praise))
    assert names(batcher.due(parent_version=0, now_ms=1)) == [*praise, "past"]


def test_where_steps_are_taken_by_the_batch_a_correction_waits_like_all_others() -> None:
    batcher = Batcher(replace(RULES, corrects=False))
    for sample in (said("a"), *(rehearsal(f"own {number}") for number in range(CORRECTION_ANSWERS))):
        batcher.receive(of(sample))
    assert batcher.to_correct() == ()
    assert batcher.due(parent_version=0, now_ms=ANSWERED_WITHIN_MS) is None


def holding(*samples: SampleAssembled) -> HintMemory:
    memory = HintMemory()
    for number, sample in enumerate(samples, 1):
        for event in memory.to_hold(plan_of(Batch(samples=(), offsets=()), number), [sample], now_ms=number):
            memory.learn(event)
    return memory


END = (90, 91)  # of a message


def hinted(name: str, hint: str, *, body: tuple[int, ...], added: tuple[int, ...], joined: int = 0) -> SampleAssembled:
    """A prompt and its hint before the end of the message; `joined` tokens before the hint became others."""
    return replace(
        said_so(name, hint),
        prompt_ids=(*body, *END),
        hinted_prompt_ids=(*body[: len(body) - joined], *added, *END),
    )


def test_a_correction_is_tried_on_its_own_prompt_and_on_others_of_the_same_key_in_turn() -> None:
    b = hinted("b", "be brief", body=(1, 2, 3), added=(70, 50))
    others = [b, replace(hinted("c", "in full", body=(4, 5), added=(70, 51)), key_name="another's")]
    own = hinted("a", "keep it plain", body=(6, 7), added=(70, 52, 53))
    asks = holding(*others).to_correct(own, 4, now_ms=9)
    assert [ask.turn_id for ask in asks] == ["a", "b", "a", "b"]
    assert {(ask.hint, ask.hint_id) for ask in asks} == {("keep it plain", OWN)}
    assert [ask.prompt_ids for ask in asks[:2]] == [own.prompt_ids, b.prompt_ids]
    assert asks[0].hinted_prompt_ids == own.hinted_prompt_ids
    assert asks[1].hinted_prompt_ids == (1, 2, 3, 70, 52, 53, *END)
    assert len({(ask.turn_id, ask.number) for ask in asks}) == len({ask.session_id for ask in asks}) == 4
    assert all(ask.number < 0 for ask in asks)
    assert holding(*others).to_correct(replace(own, num_feedback=1), 4, now_ms=9) == asks


def answers(asks: list[RehearsalAsked], known: dict[str, Known], *, version: int) -> list[SampleAssembled]:
    """The samples of those requests that the refresh stage, which has seen `known`, puts to engines."""
    found = []
    for ask in asks:
        step = observe(known.get(ask.session_id, NOTHING), ask, 1, policy_id="policy", answers_per_hint=1)
        known[ask.session_id] = step.state or NOTHING
        for call in step.calls:
            answer = rehearsal(ask.turn_id, ask.hint_id)
            spans = (replace(answer.versions[0], policy_version=version),)
            found.append(replace(answer, refreshed_id=f"{call.turn_id} {call.number}", versions=spans))
    return found


def test_the_same_words_said_again_under_a_key_have_as_many_answers_as_the_first_time() -> None:
    known: dict[str, Known] = {}
    memory, batcher = HintMemory(), Batcher(RULES)
    for version, name in enumerate("abc"):
        sample = hinted(name, "keep it plain", body=(ord(name), 7), added=(70, 52))
        correction = replace(sample, versions=(replace(sample.versions[0], policy_version=version),))
        batcher.receive(of(correction))
        asks = memory.to_correct(correction, CORRECTION_ANSWERS, now_ms=0)
        batcher.corrected(asked_of([correction]), 0)
        own = answers(asks, known, version=version)
        assert len(own) == CORRECTION_ANSWERS
        assert answers(memory.to_correct(correction, CORRECTION_ANSWERS, now_ms=9), known, version=version) == []
        for answer in own:
            assert batcher.receive(of(answer)) is None
        batch = batcher.due(parent_version=version, now_ms=1)
        assert batch is not None, "its answers are here, so nothing is waited for"
        plan = plan_of(batch, version + 1)
        batcher.plan(plan)
        batcher.executed(plan)
        for event in memory.to_hold(plan, batch.samples, now_ms=version):
            memory.learn(event)
        for answer in answers(memory.to_ask(8, version=version + 1, now_ms=0), known, version=version + 1):
            batcher.receive(of(answer))


def test_a_hint_that_was_joined_to_the_token_before_it_goes_to_prompts_that_end_with_the_same_one() -> None:
    own = hinted("a", "keep it plain", body=(6, 20), added=(71, 52, 30), joined=1)  # "?" and a line's end: one token
    alike = hinted("b", "be brief", body=(1, 2, 20), added=(71, 50), joined=1)
    apart = hinted("c", "in full", body=(4, 5), added=(70, 51))
    asks = holding(alike, apart).to_correct(own, 3, now_ms=9)
    assert [ask.turn_id for ask in asks] == ["a", "b", "a"]
    assert asks[1].hinted_prompt_ids == (1, 2, 71, 52, 30, *END)


def test_where_all_end_with_one_token_the_hinted_prompt_says_the_same_in_the_same_order() -> None:
    own = hinted("a", "keep it plain", body=(6, 20), added=(71, 52, 20), joined=1)  # the hint ends with "?", too
    other = hinted("b", "be brief", body=(1, 2, 20), added=(71, 50, 20), joined=1)
    [_, ask] = holding(other).to_correct(own, 2, now_ms=9)
    assert ask.hinted_prompt_ids == (1, 2, 71, 52, 20, *END)


def test_a_prompt_whose_hint_stands_elsewhere_is_left_out() -> None:
    own = hinted("a", "keep it plain", body=(6, 7), added=(70, 52))
    early = replace(said_so("b", "be brief"), prompt_ids=(1, 2, 3, *END), hinted_prompt_ids=(1, 70, 50, 2, 3, *END))
    assert {ask.turn_id for ask in holding(early).to_correct(own, 4, now_ms=9)} == {"a"}


@pytest.mark.parametrize(
    "sample", [rehearsal("r"), replace(said("a"), sampling=replace(said("a").sampling, temperature=0.0))]
)
def test_nothing_is_asked_of_a_hint_that_cannot_be_rehearsed(sample: SampleAssembled) -> None:
    assert HintMemory().to_correct(sample, 4, now_ms=1) == []


async def plan_after_a_complaint(
    log: MemoryLog, chosen: Settings, answer: Callable[[], tuple[int, ...]]
) -> BatchPlanned:
    """Say "no bold" of an answer; the engine answers what is asked then by these tokens. Return the first plan."""
    engine = ScriptedBackend(script=lambda _: ScriptedAnswer(token_ids=answer()), version="0")
    session = Session("s", renderer=Small(), sampled=lambda text: tuple(b % tiny.VOCABULARY for b in text.encode()))
    session.ask([user("2+2?")], "**4**")
    session.ask([user("2+2?"), assistant("**4**"), user("no bold")], "4")
    async with stages_from_turns_to_answers(log, engine):
        await log.append(session.written)
        events = await trained_until(log, chosen, 1)
    [plan] = [event for event in events if isinstance(event, BatchPlanned)]
    return plan


async def test_one_complaint_is_learned_from_before_a_batch_is_full(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    chosen = settings(base, tmp_path, batch_samples=16, gate=False, cadence="correction")
    plan = await plan_after_a_complaint(log, chosen, lambda: (7, 8, 9, 1))
    answers = {one.sample_id: one for one in await assembled(log) if one.hint_id is not None}
    own, *taken = plan.sample_ids
    assert own not in answers
    assert len(taken) >= ENOUGH_ANSWERS
    assert {answers[name].hint_id for name in taken} == {hint_id_of("policy", None, answers[taken[0]].hint or "")}
    asks = [one.event for one in await toys.read(log, ANSWERS) if isinstance(one.event, RehearsalAsked)]
    assert sum(ask.asked_at_ms <= plan.planned_at_ms for ask in asks) == CORRECTION_ANSWERS
    again = await trained_until(log, chosen, 1)  # started once more, with nothing left to do
    assert sum(isinstance(event, BatchPlanned) for event in again) == 1


async def test_a_correction_does_not_wait_for_answers_that_came_empty(base: Path, tmp_path: Path) -> None:
    log = MemoryLog(MemoryBroker())
    chosen = settings(base, tmp_path, batch_samples=16, gate=False, cadence="correction")
    empty = iter([True] * (CORRECTION_ANSWERS - ENOUGH_ANSWERS + 1))
    plan = await plan_after_a_complaint(log, chosen, lambda: () if next(empty, False) else (7, 8, 9, 1))
    said = [one.event for one in await toys.read(log, SAMPLES)]
    assert sum(isinstance(one, SampleRefused) for one in said) == CORRECTION_ANSWERS - ENOUGH_ANSWERS + 1
    assert len(plan.sample_ids) == ENOUGH_ANSWERS, "the correction, and one answer less than are enough"


def test_the_gate_remembers_first_answers_to_people_and_none_that_rehearses() -> None:
    memory = GateMemory().after([rehearsal("own"), said("a"), rehearsal("past", "another")])
    assert [canary.prompt_ids for canary in memory.canaries] == [said("a").prompt_ids]


@pytest.mark.parametrize(("rate", "num_steps"), [(1e-5, 4), (2e-4, 2), (0.3, 1)])
def test_passes_over_a_correction_end_once_the_policy_moved_far_enough(base: Path, rate: float, num_steps: int) -> None:
    trainer = Trainer(base, TrainingSettings(cadence="correction", learning_rate=rate))
    trainer.update([said("a")], version=1, seed=1)
    assert {int(state["step"]) for state in trainer._optimizer.state.values()} == {num_steps}
    batchwise = Trainer(base, TrainingSettings(epochs=4, learning_rate=rate))
    batchwise.update([said("a")], version=1, seed=1)
    assert {int(state["step"]) for state in batchwise._optimizer.state.values()} == {4}


def test_how_far_a_policy_moved_is_its_divergence_from_before_the_update() -> None:
    before, after = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-0.5, -2.5]])
    known = LogProbs(before, before, None)
    _, tally = policy_loss(
        after, known, torch.ones_like(after), torch.ones_like(after).bool(), objective=Objective(kl=0.0)
    )
    assert tally.moved_sum == pytest.approx(math.exp(0.5) - 1 - 0.5 + math.exp(-0.5) - 1 + 0.5)


def test_a_correction_is_passed_over_four_times_unless_told_otherwise() -> None:
    assert TrainingSettings().epochs == 1
    assert TrainingSettings(cadence="correction").epochs == 4
    assert TrainingSettings(cadence="correction", epochs=2).epochs == 2
    assert TrainingSettings(cadence="correction").refreshes
