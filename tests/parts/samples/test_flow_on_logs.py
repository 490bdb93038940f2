"""Turns, judging and samples under the real runner: whatever dies in mid-session, samples are those of a calm run."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import example, given

from clawstream.config import JudgeSettings
from clawstream.events import Event, TurnPaired
from clawstream.inference.judge_client import JudgeClient
from clawstream.judging.stage import Judge, judging_stage
from clawstream.samples.joining import SampleRules
from clawstream.samples.stage import samples_stage
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.runner.hosting import run
from clawstream.stream.stage import Record, Stage
from clawstream.stream.topics import HINTS, SAMPLES, TURNS, VERDICTS, VOTES
from clawstream.turns.stage import turns_stage
from tests import recorded
from tests.examples import examples
from tests.fakes.memory_group import ConnectionCut
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.flow import Flow, Oracle
from tests.parts.judging.endpoint import endpoint
from tests.sessions import Letters, Session
from tests.unit.samples.test_flow import MOVES, SEEDS, conversation
from tests.unit.stream import toys

pytestmark = pytest.mark.slow

OUTPUTS = (TURNS, VOTES, VERDICTS, HINTS, SAMPLES)
AnyLog = KafkaLog | MemoryLog


def stages(judge: Judge) -> list[Stage[Any, Any]]:
    return [
        turns_stage(),
        judging_stage(JudgeSettings(votes=3), judge, now_ms=lambda: 0),
        samples_stage(SampleRules(Letters())),
    ]


@asynccontextmanager
async def at_work(judge: Judge, log: AnyLog) -> AsyncIterator[None]:
    """All three stages; at the end of the block they finish what is under way."""
    async with AsyncExitStack() as stack:
        for stage in stages(judge):
            await stack.enter_async_context(toys.running(stage, log))
        yield


@asynccontextmanager
async def killed_after(judge: Judge, log: AnyLog) -> AsyncIterator[None]:
    """All three stages; at the end of the block they end where they are."""
    workers = [asyncio.create_task(run(stage, log, stop=asyncio.Event(), pace=toys.HASTE)) for stage in stages(judge)]
    try:
        yield
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.wait(workers)


async def come(log: AnyLog, topics: Sequence[str], expected: dict[str, dict[str, Event]]) -> None:
    """Return when all that is expected stands on the topics."""
    missing = {event_id for topic in topics for event_id in expected[topic]}
    async with asyncio.timeout(90):
        async for records in log.follow(topics):
            missing -= {record.event.event_id for record in records if isinstance(record, Record)}
            if not missing:
                return


async def outputs(log: AnyLog) -> dict[str, dict[str, Event]]:
    """What stands on each topic, of two events with one id the first."""
    found: dict[str, dict[str, Event]] = {topic: {} for topic in OUTPUTS}
    for topic in OUTPUTS:
        for record in await toys.read(log, topic):
            found[topic].setdefault(record.event.event_id, record.event)
    return found


def calm(events: Sequence[Event], judge: Oracle) -> dict[str, dict[str, Event]]:
    log = Flow(judge).run(events)
    return {topic: log.first_by_id(topic) for topic in OUTPUTS}


@examples(0.15)
@given(MOVES, MOVES, SEEDS)
@example([], ["reset", "ask", "side", "side", "done", "ask", "ask", "ask", "ask"], 87070)  # settled twice, once over
def test_stages_that_die_at_any_operation_give_the_samples_of_a_calm_run(
    ann: list[str], ben: list[str], seed: int
) -> None:
    rng = random.Random(seed)
    events = [*conversation(ann, "ann"), *conversation(ben, "ben")]
    at = rng.randint(0, len(events))

    async def scenario() -> dict[str, dict[str, Event]]:
        broker, judge = MemoryBroker(partitions=rng.choice([1, 3])), Oracle()
        log = MemoryLog(broker)
        await log.append(events[:at])
        for _ in range(2):
            await asyncio.gather(*(die(stage, broker, rng) for stage in stages(judge)))
        await log.append(events[at:])
        async with at_work(judge, log):
            for stage in stages(judge):  # each is done once those before it are
                await toys.settled(log, stage.name)
        return await outputs(log)

    assert asyncio.run(scenario()) == calm(events, Oracle())


async def die(stage: Stage[Any, Any], broker: MemoryBroker, rng: random.Random) -> None:
    """Run the stage until its connection is cut, or nothing happens any more."""
    cut = ConnectionCut(operations=rng.randint(1, 30), takes_effect=rng.random() < 0.5)
    worker = asyncio.create_task(run(stage, MemoryLog(broker, cut=cut), stop=asyncio.Event(), pace=toys.HASTE))
    dead = asyncio.create_task(cut.happened.wait())
    await asyncio.wait([worker, dead], return_when=asyncio.FIRST_COMPLETED, timeout=0.2)
    for task in (worker, dead):
        task.cancel()
    await asyncio.wait([worker, dead])


def openclaw_and_chat() -> tuple[list[Event], list[Event]]:
    """Three sessions of a real client and a plain chat, cut in the middle of each."""
    s1, s2, s9 = Session("s1"), Session("s2"), Session("s9")
    begun = [
        s1.ask(recorded.FIRST_TURN, recorded.GREETING),
        s2.ask(recorded.OTHER_SESSION, "hello"),
        s9.ask(recorded.TOOL_REQUEST, recorded.LOOKING),
        s9.ask(recorded.TOOL_RESULTS, recorded.FINISHED),
    ]
    ended = [
        s1.ask(recorded.USER_CORRECTS, "2 and 2 is 4"),
        s9.ask(recorded.USER_CORRECTS_AFTER_TOOLS, "sorry"),
        *(session.done() for session in (s1, s2, s9)),
    ]
    chat = conversation(["ask", "ask", "ask", "done"], "chat")
    return [*begun, *chat[:2]], [*ended, *chat[2:]]


async def test_every_stage_restarted_in_mid_session_on_kafka_loses_no_pair_and_invents_none(
    kafka_bootstrap: str, topic_prefix: str
) -> None:
    first, second = openclaw_and_chat()
    oracle = Oracle()

    async def reply(body: dict[str, Any]) -> web.StreamResponse:
        system, user = (message["content"] for message in body["messages"])
        said = await oracle.ask(system, user, seed=body["seed"])
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": said.text}}]})

    await admin.apply(kafka_bootstrap, topic_prefix, partitions=3)
    async with (
        endpoint(reply) as judged,
        JudgeClient.open(JudgeSettings(url=judged.url)) as judge,
        KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log,
    ):
        asked = Oracle()
        asked.name = judge.name
        await log.append(first)
        async with at_work(judge, log):
            await come(log, OUTPUTS, calm(first, asked))
        await log.append(second[:2])
        async with killed_after(judge, log):
            await come(log, (TURNS,), calm([*first, *second[:2]], asked))
        await log.append(second[2:])
        expected = calm([*first, *second], asked)
        async with at_work(judge, log):
            await come(log, OUTPUTS, expected)
        assert await outputs(log) == expected
    paired = [event for event in expected[TURNS].values() if isinstance(event, TurnPaired)]
    assert sorted(turn.session_id for turn in paired) == ["chat", "chat", "s1", "s9", "s9"]
    assert expected[SAMPLES]
