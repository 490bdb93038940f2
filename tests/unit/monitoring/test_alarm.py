"""An alarm names why learning stands still, and none is raised while something moves or little went by."""

from dataclasses import replace

import pytest

from clawstream.events import NOBODY, PlannedTurn, StepRejected, StepTaken
from clawstream.monitoring.alarm import STILL_MS, STILL_SAMPLES, standstill, starved
from clawstream.monitoring.policy import LearnedFrom, PolicyBoard
from clawstream.monitoring.windows import EventCounts
from clawstream.stream.stage import Record
from clawstream.stream.topics import POLICY, SAMPLES
from tests.unit.monitoring.said import plan, rejected, sample
from tests.unit.projections.logs import example

STEP = example(
    StepTaken, policy_id="policy", num_samples=16, num_hinted=4, mean_reward=-0.5, grad_norm=1.0, learning_rate=1e-5,
    weights_changed_share=1.0,
)  # fmt: skip
COUNT = STILL_SAMPLES // 16


def steps(**changes: object) -> list[StepTaken | StepRejected]:
    assert isinstance(STEP, StepTaken)
    return [replace(STEP, policy_version=number, **changes) for number in range(1, COUNT + 1)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"learning_rate": 0.0, "weights_changed_share": 0.0}, "the learning rate is 0"),
        ({"weights_changed_share": 0.0}, "no weight changed"),
        ({"grad_norm": None, "weights_changed_share": None}, "no token of them could be trained on"),
        ({"num_hinted": 0}, "stands at -0.50: none of them has a hint"),
        ({}, "stands at -0.50: 32 of them have a hint"),
    ],
)
def test_the_cause_is_named(changes: dict[str, object], cause: str) -> None:
    assert cause in (standstill(steps(**changes)) or "")
    assert standstill(steps(**changes)[1:]) is None


def test_where_every_step_is_rejected_the_last_reason_is_named() -> None:
    refused: list[StepTaken | StepRejected] = [
        replace(rejected(number, f"reason {number}"), num_samples=16) for number in range(1, COUNT + 1)
    ]
    assert (standstill(refused) or "").endswith(f"because reason {COUNT}")
    assert "rejected" not in (standstill([*refused[1:], *steps()[:1]]) or "")


def test_a_score_that_moves_or_is_good_is_no_alarm() -> None:
    moving = [steps(mean_reward=-0.5 + 0.1 * number)[number] for number in range(COUNT)]
    assert standstill(moving) is None
    assert standstill(steps(mean_reward=0.9)) is None


THUMBS = [
    -0.04, 0.13, -0.25, 0.0, 0.13, 0.0, 0.25, -0.13, 0.13, 0.25, 0.0, 0.13, 0.38, 0.13, 0.25, 0.38, 0.25, 0.33,
]  # fmt: skip


def test_what_moves_slowly_under_one_persons_thumbs_does_not_stand_still() -> None:
    moving: list[StepTaken | StepRejected] = [
        replace(STEP, policy_version=number, mean_reward=reward, num_hinted=0)
        for number, reward in enumerate(THUMBS, 1)
        if isinstance(STEP, StepTaken)
    ]
    assert [standstill(moving[:number]) for number in range(14, len(moving) + 1)] == [None] * 5
    flat = [replace(one, mean_reward=0.06 * (-1) ** number) for number, one in enumerate(moving)]
    assert "stands at" in (standstill(flat) or "")


def test_what_was_learned_from_is_counted_thumbs_verdicts_and_hints() -> None:
    board = PolicyBoard("policy")
    turns = (("judge", 1), ("judge", None), (NOBODY, 2), (NOBODY, 1))
    planned = replace(
        plan(1, (), {}),
        turns=tuple(
            PlannedTurn(turn_id=str(n), judge=judge, prompt_version="1", revision=0, num_feedback=feedback)
            for n, (judge, feedback) in enumerate(turns)
        ),
    )
    assert isinstance(STEP, StepTaken)
    said = [
        planned,
        replace(STEP, policy_version=1, num_hinted=2),
        replace(planned, policy_version=2),
        rejected(2, "no"),
    ]
    for offset, event in enumerate(said):
        board.learn(Record(topic=POLICY, partition=0, offset=offset, timestamp_ms=0, key="policy", event=event))
    assert board.learned_from == LearnedFrom(samples=4, with_feedback=3, judged=2, hinted=2)


def test_the_board_knows_only_its_own_policy_s_steps() -> None:
    board = PolicyBoard("policy")
    for offset, step in enumerate(steps(learning_rate=0.0)):
        board.learn(Record(topic=POLICY, partition=0, offset=offset, timestamp_ms=0, key="policy", event=step))
    assert "the learning rate is 0" in (board.alarm(0) or "")
    assert PolicyBoard("other").alarm(0) is None


@pytest.mark.parametrize(
    ("hour", "cause"),
    [
        (EventCounts(votes={"failed": 6}), "the judge is down"),
        (EventCounts(turns_paired=4), "4 turns of the last hour have no vote"),
        (EventCounts(votes={"readable": 30}, refusals={"no_signal": 9, "truncated": 1}), "9 of them no_signal"),
        (EventCounts(votes={"unreadable": 30}, verdicts=10), "enough readable votes"),
        (EventCounts(votes={"failed": 300}, samples=1), None),
        (EventCounts(votes={"failed": 3}), None),
        (EventCounts(turns_paired=3), None),
    ],
)
def test_an_hour_without_a_sample_has_a_cause_that_one_person_gets_to_know(
    hour: EventCounts, cause: str | None
) -> None:
    found = starved(hour, hour)
    assert (found is None) if cause is None else (cause in (found or ""))


def test_turns_that_a_judge_has_still_time_for_or_that_none_is_asked_about_are_no_alarm() -> None:
    assert starved(EventCounts(turns_paired=9), EventCounts()) is None
    assert starved(EventCounts(turns_paired=9), EventCounts(turns_paired=9), judged=False) is None


@pytest.mark.parametrize("batch_samples", [16, STILL_SAMPLES - 1, STILL_SAMPLES, 4 * STILL_SAMPLES])
def test_a_score_that_stands_is_named_however_large_batches_are(batch_samples: int) -> None:
    board, offset = PolicyBoard("policy"), 0
    for offset, step in enumerate(steps(num_samples=batch_samples)):
        board.learn(Record(topic=POLICY, partition=0, offset=offset, timestamp_ms=0, key="policy", event=step))
    assert "stands at -0.50" in (board.alarm(0) or "")


def waiting(num_samples: int, batch_samples: int | None) -> PolicyBoard:
    """A batch was planned at 0, or none was; a millisecond later samples began to come, one a millisecond."""
    board = PolicyBoard("policy")
    if batch_samples is not None:
        planned = plan(1, tuple(sample(f"planned-{number}") for number in range(batch_samples)), {})
        board.learn(Record(topic=POLICY, partition=0, offset=0, timestamp_ms=0, key="policy", event=planned))
    for n in range(num_samples):
        one = sample(f"t-{n}")
        board.learn(Record(topic=SAMPLES, partition=0, offset=n, timestamp_ms=1 + n, key="s", event=one))
    return board


@pytest.mark.parametrize(
    ("batch_samples", "enough", "cause"),
    [
        (None, STILL_SAMPLES, "no batch was ever planned"),
        (16, STILL_SAMPLES, "none was planned after version 1"),
        (STILL_SAMPLES, 2 * STILL_SAMPLES, "none was planned after version 1"),
    ],
)
def test_where_samples_wait_and_none_is_planned_the_trainer_is_asked_about(
    batch_samples: int | None, enough: int, cause: str
) -> None:
    told = waiting(enough, batch_samples).alarm(enough + STILL_MS)
    assert f"{enough} samples wait and {cause}: does `clawstream train` run?" in (told or "")
    assert waiting(enough, batch_samples).alarm(enough + STILL_MS - 1) is None
    assert waiting(enough - 1, batch_samples).alarm(enough + STILL_MS) is None


def test_samples_that_came_before_the_newest_plan_are_those_it_will_get_to() -> None:
    board = waiting(2 * STILL_SAMPLES, None)
    board.learn(Record(topic=POLICY, partition=0, offset=0, timestamp_ms=10**6, key="policy", event=plan(1, (), {})))
    assert board.alarm(10**6 + STILL_MS) is None
