"""Feedback under the real runner: stages that are killed come to the same sample of each turn, on Kafka too."""

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given

from clawstream.events import Event, ExchangeCompleted, FeedbackSource, SampleAssembled
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.topics import SAMPLES
from tests.examples import examples
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.flow import Flow, Oracle
from tests.parts.samples.test_flow_on_logs import AnyLog, at_work, come, die, killed_after, outputs, stages
from tests.unit.samples.test_feedback import THUMBS, newest, place, rated, thumb
from tests.unit.samples.test_flow import MOVES, SEEDS, conversation
from tests.unit.stream import toys

pytestmark = pytest.mark.slow


async def holding(log: AnyLog) -> dict[str, SampleAssembled]:
    """Each turn's sample that holds."""
    found: dict[str, SampleAssembled] = {}
    for sample in (await outputs(log))[SAMPLES].values():
        if isinstance(sample, SampleAssembled):
            found[sample.turn_id] = max(found.get(sample.turn_id, sample), sample, key=place)
    return found


@examples(0.15)
@given(MOVES, THUMBS, SEEDS)
def test_stages_that_die_at_any_operation_come_to_the_samples_of_a_calm_run(
    moves: list[str], thumbs: list[tuple[float, int, float | None, FeedbackSource]], seed: int
) -> None:
    rng = random.Random(seed)
    moves = [move for n, move in enumerate(moves) if move != "done" or moves[:n].count("done") < 4]
    events = rated(conversation(["ask", "ask", *moves]), thumbs)
    at = rng.randint(0, len(events))

    async def scenario() -> dict[str, SampleAssembled]:
        broker, judge = MemoryBroker(partitions=rng.choice([1, 3])), Oracle()
        log = MemoryLog(broker)
        await log.append(events[:at])
        for _ in range(2):
            await asyncio.gather(*(die(stage, broker, rng) for stage in stages(judge)))
        await log.append(events[at:])
        async with at_work(judge, log):
            for stage in stages(judge):
                await toys.settled(log, stage.name)
        return await holding(log)

    assert asyncio.run(scenario()) == newest(Flow(Oracle()).run(events))


async def test_a_samples_stage_that_is_killed_on_kafka_revises_what_it_wrote_before(
    kafka_bootstrap: str, topic_prefix: str
) -> None:
    events = conversation(["ask", "ask", "ask", "done"], "chat")
    answers = [event.exchange_id for event in events if isinstance(event, ExchangeCompleted)]
    early: list[Event] = [_of("chat", answers[0], 1.0, "a"), _of("chat", answers[1], -1.0, "b")]
    late: list[Event] = [_of("chat", answers[0], -1.0, "c"), _of("chat", answers[1], -1.0, "d")]
    lost = _of("chat", "nowhere", 1.0, "e")
    judge = Oracle()
    before, after = Flow(judge), Flow(judge)
    first, last = newest(before.run([*events, *early])), newest(after.run([*events, *early, *late]))
    await admin.apply(kafka_bootstrap, topic_prefix)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log:
        await log.append([lost, *events, *early])
        async with killed_after(judge, log):
            await come(log, [SAMPLES], {SAMPLES: {one.sample_id: one for one in first.values()}})
        await log.append([*late, *late])
        async with at_work(judge, log):
            await come(log, [SAMPLES], {SAMPLES: {one.sample_id: one for one in last.values()}})
            await toys.settled(log, "samples")
        assert await holding(log) == last
    revised = last[answers[0]]
    assert (revised.num_feedback, revised.person_reward) == (2, -1.0)
    assert last[answers[1]].num_feedback == 1


def _of(session_id: str, turn_id: str, score: float, name: str) -> Event:
    return replace(thumb(turn_id, score, name), session_id=session_id)
