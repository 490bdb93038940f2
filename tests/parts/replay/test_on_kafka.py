"""Replays on a real broker, with worker processes and a judge over HTTP."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from clawstream.config import EngineSettings, JudgeSettings, KafkaSettings, Settings, dump
from clawstream.events import ReplayEnded
from clawstream.inference.judge_client import judge_name
from clawstream.replay.registry import Registry, promote
from clawstream.replay.running import compared
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Outgoing
from clawstream.stream.topics import CONTROL, event_topics
from tests.parts.judging.endpoint import completion, endpoint
from tests.parts.replay.making import DEMO, Maker, demo_model

NUM_SESSIONS = 8

pytestmark = pytest.mark.timeout(300)  # each worker is a process that loads a tokenizer


@pytest.fixture
async def recorded(kafka_bootstrap: str, topic_prefix: str, tmp_path: Path) -> AsyncIterator[tuple[Settings, KafkaLog]]:
    """An installation's settings and its log, with sessions that were judged."""
    async with run_through(kafka_bootstrap, topic_prefix, demo_model(tmp_path / "model"), partitions=3) as installation:
        yield installation


@asynccontextmanager
async def run_through(
    bootstrap: str, prefix: str, model_path: Path, *, partitions: int
) -> AsyncIterator[tuple[Settings, KafkaLog]]:
    """The same sessions, on so many partitions."""
    await admin.apply(bootstrap, prefix, partitions=partitions)
    settings = Settings(
        data_dir=model_path.parent / prefix,
        kafka=KafkaSettings(bootstrap=bootstrap, prefix=prefix),
        engine=EngineSettings(model_path=model_path),
        judge=JudgeSettings(votes=3),
    )
    async with KafkaLog.connect(bootstrap, prefix=prefix) as log:
        for exchanges, votes in Maker(model_path, DEMO).sessions(NUM_SESSIONS):
            await log.write([Outgoing(event) for event in [*exchanges, *votes]])
        yield settings, log


async def start(settings: Settings, name: str, *, workers: int = 1, judge: str | None = None) -> ReplayEnded:
    """In a process of its own, as what workers are forks of is one for a whole process."""
    file = settings.data_dir / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(dump(settings))
    arguments = [str(file), name, str(workers), *([] if judge is None else [judge])]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.parts.replay.program", *arguments, stdout=PIPE, stderr=PIPE
    )
    try:
        said, words = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, words.decode()[-2000:]
    return ReplayEnded(**json.loads(said))


@pytest.mark.slow
async def test_recorded_votes_give_the_same_bytes_by_one_process_and_by_two(
    recorded: tuple[Settings, KafkaLog],
) -> None:
    settings, log = recorded
    live = [topic for topic in event_topics() if topic != CONTROL]
    before = await log.end_offsets(live)
    one = await start(settings, "one")
    two = await start(settings, "two", workers=2)
    assert one.samples_sha256 == two.samples_sha256
    assert one.num_exchanges == NUM_SESSIONS * DEMO.num_exchanges
    assert one.num_samples == one.num_turns == NUM_SESSIONS * (DEMO.num_exchanges - 1)
    assert 0 < one.num_hints < one.num_turns
    assert one.num_unusable == 0
    assert await log.end_offsets(live) == before
    samples = await log.end_offsets(["clawstream.replay.two.samples.v1"])
    assert sum(samples.values()) == two.num_samples + two.num_refused


@pytest.mark.slow
async def test_partitions_and_processes_make_no_difference_to_a_byte(
    kafka_bootstrap: str, topic_prefix: str, tmp_path: Path
) -> None:
    model_path = demo_model(tmp_path / "model")
    found: set[str] = set()
    for partitions, workers in ((1, 1), (12, 4)):
        prefix = f"{topic_prefix}{partitions}."
        async with run_through(kafka_bootstrap, prefix, model_path, partitions=partitions) as (settings, _):
            ended = await start(settings, "again", workers=workers)
            assert ended.num_samples == NUM_SESSIONS * (DEMO.num_exchanges - 1)
            found.add(ended.samples_sha256)
    assert len(found) == 1


@pytest.mark.slow
async def test_a_judge_asked_again_over_http_can_be_compared_and_promoted(
    recorded: tuple[Settings, KafkaLog],
) -> None:
    settings, log = recorded

    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        hint = "[HINT_START]" in body["messages"][0]["content"]
        return completion("\\boxed{-1}" if hint else "\\boxed{1}")

    async with endpoint(answer) as judge:
        asking = settings.judge.model_copy(update={"url": judge.url, "model": "new"})
        settings = settings.model_copy(update={"judge": asking})
        ended = await start(settings, "asked", workers=2, judge=judge_name("new", judge.url))
        assert ended.num_calls == len(judge.bodies) == 6 * ended.num_turns
    assert ended.num_samples == ended.num_turns == ended.num_verdicts == NUM_SESSIONS * (DEMO.num_exchanges - 1)
    registry = await Registry.read(log)
    found = (await compared(log, registry.started["asked"])).figures()
    assert found["agreement"] is None
    assert found["calls_replay"] == ended.num_calls
    assert found["prompt_tokens_replay"] == 11 * ended.num_calls
    assert found["turns_missing_live"] == ended.num_turns  # nobody's verdicts stand on the live topic
    await promote(log, "asked", policy_id="policy", now_ms=1)
    assert (await Registry.read(log)).pointer("policy") == "asked"
