"""Updates are versions that were published, the number of a rejected step is none; and when all is quiet."""

from typing import cast

import pytest

from clawstream.simulation.runs import programs
from clawstream.simulation.runs.programs import Watch
from clawstream.simulation.runs.scenarios import CASTS
from clawstream.stream.kafka.kafka_log import KafkaLog
from tests.unit.monitoring.said import activated, plan, published, rejected


async def test_an_update_is_a_version_that_was_published_and_is_served() -> None:
    watch = Watch()
    for event in (
        published(0),
        activated(0),
        plan(1, (), {}),
        published(1),
        activated(1),
        plan(2, (), {}),
        rejected(2),
    ):
        watch._learn(event)
    assert (watch.updates, watch.num_rejected, watch.versions) == (1, 1, (0, 1))

    watch._learn(published(3))
    assert (watch.updates, watch.versions) == (1, (0, 1, 3))
    watch._learn(activated(3))
    assert watch.updates == 2


class Lags:
    """A log on which one stage is behind for the first few looks."""

    def __init__(self, behind: str) -> None:
        self.behind = behind
        self.asked: list[str] = []

    async def lag(self, stage: str) -> int:
        self.asked.append(stage)
        return 1 if stage == self.behind and self.asked.count(stage) < 3 else 0


@pytest.mark.parametrize("behind", ["samples", "refresh"])
async def test_all_is_quiet_once_answers_given_again_are_samples_where_hints_have_them(behind: str) -> None:
    log = Lags(behind)
    await programs.quiet(CASTS["all"], Watch(refreshes=True), cast("KafkaLog", log))
    assert log.asked == ["turns", "judging", "refresh", "samples"] * 5


async def test_a_stage_that_no_hint_needs_is_not_waited_for() -> None:
    log = Lags("refresh")
    await programs.quiet(CASTS["all"], Watch(), cast("KafkaLog", log))
    assert log.asked == ["turns", "judging", "samples"] * 3
