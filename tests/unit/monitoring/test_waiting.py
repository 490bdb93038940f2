"""A trainer that stopped, wherever it runs, is known by the samples that wait and by what the log says of it last."""

from dataclasses import replace

import pytest

from clawstream.config import TrainingSettings
from clawstream.events import Event
from clawstream.monitoring.alarm import IDLE_MS, STILL_MS, BatchRule
from clawstream.monitoring.policy import PolicyBoard
from clawstream.monitoring.status import due_of
from clawstream.stream.stage import Record
from clawstream.stream.topics import POLICY, SAMPLES
from tests.unit.monitoring.said import plan, published, rejected, sample

DUE = BatchRule(batch_samples=16, max_wait_ms=3_600_000)
S = [sample(str(number)) for number in range(64)]


def board(samples: int, *said: Event) -> PolicyBoard:
    """At 0 all this was said of the trainer; a millisecond later samples began to come, one a millisecond."""
    made = PolicyBoard("policy", DUE)
    for offset, event in enumerate(said):
        made.learn(Record(topic=POLICY, partition=0, offset=offset, timestamp_ms=0, key="policy", event=event))
    for n in range(samples):
        made.learn(Record(topic=SAMPLES, partition=0, offset=n, timestamp_ms=1 + n, key="s", event=S[n]))
    return made


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            (published(3),),
            "the trainer was last heard of 10 min ago (version 3 published): does `clawstream train` run?",
        ),
        ((rejected(3, "it looped"),), "(version 3 rejected)"),
        ((), "the trainer was never heard of"),
    ],
)
def test_a_batch_that_is_due_and_not_planned_is_an_alarm_that_one_person_gets(
    said: tuple[Event, ...], words: str
) -> None:
    told = board(32, *said).alarm(16 + IDLE_MS)
    assert "32 samples wait, a batch was due 10 min ago" in (told or "")
    assert words in (told or "")
    assert board(32, *said).alarm(16 + IDLE_MS - 1) is None
    assert board(15, *said).alarm(16 + IDLE_MS) is None


def test_fewer_than_a_batch_are_due_once_the_oldest_has_waited_long_enough() -> None:
    few = board(3, published(3))
    assert few.alarm(DUE.max_wait_ms + IDLE_MS) is None
    assert "3 samples wait" in (few.alarm(1 + DUE.max_wait_ms + IDLE_MS) or "")


def test_rehearsals_wait_for_other_samples_and_are_no_batch_that_is_due() -> None:
    made = board(3, published(3))
    for n in range(32):
        event = replace(sample(f"r{n}"), refreshed_id=f"answer {n}", hint_id="held")
        made.learn(Record(topic=SAMPLES, partition=1, offset=n, timestamp_ms=1, key="r", event=event))
    assert made.num_waiting == 3
    assert made.alarm(DUE.max_wait_ms + IDLE_MS) is None


def test_a_trainer_that_died_in_a_step_is_known_and_one_that_takes_long_is_left_in_peace() -> None:
    in_step = board(32, plan(4, (S[0],), {}))
    assert in_step.alarm(STILL_MS - 1) is None
    assert "(version 4 planned), and its step is not done yet" in (in_step.alarm(STILL_MS) or "")


def test_where_nothing_waits_a_silent_trainer_is_none_that_stopped() -> None:
    assert board(0, published(3)).alarm(10**12) is None


def test_groups_are_not_told_by_how_many_samples_wait() -> None:
    assert due_of(TrainingSettings(method="stepwise")) is None
    assert due_of(TrainingSettings()) == DUE
