"""What the trainer says of samples it has no use for: each reason by name, in few lines however many come."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from clawstream.training.batches.following import LOST, WHY, grown
from clawstream.training.batches.planning import DropReason
from clawstream.training.loop import train
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.training import tiny
from tests.parts.training.test_loop import settings


def test_a_reason_is_said_at_once_and_again_each_time_its_samples_have_doubled() -> None:
    said: Counter[DropReason] = Counter()
    lines = []
    for number in range(1, 101):
        found = grown({DropReason.STALE: number}, said)
        said.update({reason: number - said[reason] for reason in found})
        lines += list(found.values())

    assert lines == [1, 2, 4, 8, 16, 32, 64]


def test_reasons_are_counted_apart_and_what_none_was_dropped_for_is_not_said() -> None:
    dropped = Counter({DropReason.STALE: 3, DropReason.LATE: 5, DropReason.SUPERSEDED: 0})

    assert grown(dropped, Counter({DropReason.LATE: 3})) == {DropReason.STALE: 3}


def test_each_reason_has_words_but_for_what_is_trained_on_all_the_same_or_set_aside_and_named_there() -> None:
    assert set(DropReason) - set(WHY) == {DropReason.REPEATED, DropReason.UNTRAINABLE}
    assert set(WHY) >= LOST


async def test_the_trainer_s_log_says_how_many_samples_it_has_no_use_for_and_why(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MemoryLog(MemoryBroker())
    silent, theirs = tiny.sample("silent", reward=None), tiny.sample("theirs", policy_id="another")
    await log.append([silent, theirs, tiny.sample("same"), tiny.sample("same")])
    caplog.set_level("INFO")
    stop = asyncio.Event()
    running = asyncio.create_task(train(settings(base, tmp_path), log, stop=stop))

    reasons = (DropReason.OTHER_POLICY, DropReason.NO_SIGNAL)
    lines = {f"samples_dropped=1 trained=never reason={WHY[reason]}" for reason in reasons}
    async with asyncio.timeout(60):
        while not lines <= set(caplog.messages) and not running.done():
            await asyncio.sleep(0.01)
    stop.set()
    await running
    assert {line for line in caplog.messages if "samples_dropped" in line} == lines
