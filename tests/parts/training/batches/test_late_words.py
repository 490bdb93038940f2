"""Words about an answer that was trained on already: a correction of the answer that is given again."""

from dataclasses import replace
from typing import Any

import pytest

from clawstream.events import FOR_A_LATE_SAMPLE, NOBODY, AnswerRefreshed, SampleAssembled
from clawstream.training.batches.choosing import ANSWERED_WITHIN_MS, ENOUGH_ANSWERS
from clawstream.training.batches.planning import Batch, Batcher, DropReason
from tests.parts.training.batches.test_batches import of, plan_of
from tests.parts.training.batches.test_corrections import asked_of, batcher_with, names, rehearsal, said


@pytest.mark.parametrize("by_person", [True, False])
def test_words_of_a_person_about_an_answer_that_was_trained_on_are_a_correction_of_the_answer_given_again(
    by_person: bool,
) -> None:
    batcher = corrected(replace(said("a"), hint_by_person=by_person))
    words = replace(said("a"), hint="in bold", hint_by_person=by_person, num_feedback=1)
    assert batcher.receive(of(words)) is DropReason.LATE
    if not by_person:
        assert batcher.to_refresh() == (), "a judge's second thought"
        return
    [late] = batcher.to_refresh()
    assert late.sample == words
    batcher.asked([late])
    again = replace(words, reward=None, total_reward=None, refreshed_id=given_again("a", FOR_A_LATE_SAMPLE))
    further = replace(again, refreshed_id=given_again("a", FOR_A_LATE_SAMPLE + 1))
    for sample in (again, further):
        assert batcher.receive(of(sample)) is None
    assert batcher.to_correct() == (again,)
    batcher.corrected(asked_of([again]), 1)
    assert [sample.answer_id for sample in due(batcher, 1 + ANSWERED_WITHIN_MS).samples] == [again.answer_id]


def corrected(sample: SampleAssembled) -> Batcher:
    """A batcher whose correction is trained on."""
    batcher = batcher_with(sample, *(rehearsal(f"own {number}") for number in range(ENOUGH_ANSWERS)))
    batch = batcher.due(parent_version=0, now_ms=1)
    assert batch is not None
    batcher.plan(plan_of(batch, 1))
    batcher.executed(plan_of(batch, 1))
    return batcher


@pytest.mark.parametrize("change", [{"num_feedback": 2, "total_reward": -0.5}, {"judge": "j", "reward": 1}], ids=str)
def test_the_same_words_are_no_correction_again_when_a_thumb_or_a_verdict_follows(change: dict[str, Any]) -> None:
    words = replace(said("a"), judge=NOBODY, reward=None, hint_by_person=True, num_feedback=1)
    batcher = corrected(words)
    assert batcher.receive(of(replace(words, **change))) is DropReason.LATE
    assert batcher.to_refresh() == ()


def given_again(turn_id: str, number: int) -> str:
    """The id of the new answer to the turn's prompt."""
    answer = AnswerRefreshed(
        session_id="s", turn_id=turn_id, number=number, policy_id="policy", sampling=said("a").sampling, versions=(),
        message=None, output_ids=(), output_logprobs=(), finish_reason=None, error="none", answered_at_ms=0,
    )  # fmt: skip
    return answer.event_id


def due(batcher: Batcher, now_ms: int) -> Batch:
    batch = batcher.due(parent_version=1, now_ms=now_ms)
    assert batch is not None
    return batch


def test_a_further_answer_to_a_hinted_turn_is_no_correction_of_its_own() -> None:
    batcher = batcher_with(said("a"), replace(said("b"), refreshed_id="a further answer"))
    assert names(batcher.due(parent_version=0, now_ms=ANSWERED_WITHIN_MS)) == ["a"]
