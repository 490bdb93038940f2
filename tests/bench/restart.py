"""How long each stage is away when it is stopped or killed while 1,000 sessions are open.

Everything is real but the models: the stages are the commands, on one broker and one database; people talk to the
gateway. A stage counts as live again once it has done a record that was made after it was started again, and the time
runs from the signal on. Broker, database, stages, engine, judges and people share the machine's cores.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import psycopg
import typer
from aiohttp import web
from sqlalchemy.engine import make_url

from clawstream.config import Settings, dump
from clawstream.events import BatchPlanned, Event, SampleAssembled, StepTaken, TurnPaired, VerdictReached
from clawstream.local.servers.server_process import HOST, reserved
from clawstream.projections import database
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.stage import Record
from clawstream.stream.topics import topic_of
from tests import servers
from tests.bench.processes import usage
from tests.bench.report import report
from tests.bench.slot import Slot
from tests.chaos.peers import engine
from tests.fakes.scripted_engine import serving
from tests.parts.engine.tiny_model import make_model
from tests.renderers import load_renderer

STAGES = ("gateway", "turns", "judging", "samples", "project", "train")
SIGNALS = {"stopped": signal.SIGTERM, "killed": signal.SIGKILL}
PEOPLE_AT_ONCE = 16
LIVE_WITHIN_S = 120.0
CONTEXT_TOKENS = 4096
LOOK_EVERY_S = 0.05
BATCH = 256


def restart(
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    sessions: Annotated[int, typer.Option(min=10, help="Open ones.")] = 1000,
    turns: Annotated[int, typer.Option(min=1, help="Of each, before the stages are stopped.")] = 2,
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    stages: Annotated[list[str] | None, typer.Option("--stage", help="Only these.")] = None,
) -> None:
    """Stop and kill each stage; seconds until it is live again."""
    # An installed package has its bytecode on disk; without it the trainer compiles for ten seconds at each start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bootstrap = stack.enter_context(servers.kafka(folder / "kafka"))
        postgres = stack.enter_context(servers.postgres(folder / "postgres"))
        url = stack.enter_context(servers.database(postgres, "bench_restart"))
        database.upgrade(url)
        figures = asyncio.run(_measure(folder, bootstrap, url, sessions, turns, rounds, stages))
    report({"cores": len(os.sched_getaffinity(0)), "sessions": sessions, "turns": turns} | figures, json_file)


@dataclass(slots=True, kw_only=True)
class Person:
    """Somebody in the middle of a session that is never said to be done."""

    session_id: str
    http: aiohttp.ClientSession
    url: str
    messages: list[dict[str, str]] = field(default_factory=list)

    async def ask(self) -> str:
        """Ask the next thing until it is answered; return the exchange's id."""
        question = {"role": "user", "content": f"Turn {len(self.messages)} of {self.session_id}?"}
        body = {"model": "policy", "messages": [*self.messages, question], "max_tokens": 64}
        async with asyncio.timeout(LIVE_WITHIN_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                    async with self.http.post(
                        f"{self.url}/v1/chat/completions", json=body, headers={"X-Session-Id": self.session_id}
                    ) as answer:
                        if answer.status == 200:
                            found = await answer.json()
                            break
                await asyncio.sleep(LOOK_EVERY_S)
        self.messages += [question, {"role": "assistant", "content": found["choices"][0]["message"]["content"]}]
        return str(found["id"].removeprefix("chatcmpl-"))


@dataclass(slots=True, kw_only=True)
class Rig:
    """All of it, running."""

    log: KafkaLog
    dsn: str
    parts: dict[str, Slot]
    people: Iterator[Person]

    async def away(self, stage: str, number: signal.Signals) -> dict[str, float]:
        """Send the stage a signal, start it again, and return how long it was away, by the second."""
        part = self.parts[stage]
        ends = await self.log.end_offsets([topic_of(kind) for kind in (TurnPaired, VerdictReached, SampleAssembled)])
        policy_ends = await self.log.end_offsets([topic_of(StepTaken)])
        lives = len(part.pids)
        began_s = time.monotonic()
        part.send(number)
        while len(part.pids) == lives:
            await asyncio.sleep(0.01)
        ended_s = time.monotonic()
        person = next(self.people)
        exchange_id = await person.ask()
        async with asyncio.timeout(LIVE_WITHIN_S):
            await self._done(stage, person.session_id, exchange_id, {**ends, **policy_ends})
        live_s = time.monotonic()
        return {
            "until_gone_s": round(ended_s - began_s, 2),
            "until_live_s": round(live_s - began_s, 2),
            "cpu_s": round(usage(part.pids[-1]).cpu_s, 2),  # of the new process, however busy the machine is
        }

    async def _done(self, stage: str, session_id: str, exchange_id: str, ends: Any) -> None:
        if stage == "gateway":
            return
        if stage == "project":
            while not await asyncio.to_thread(self._has_row, exchange_id):
                await asyncio.sleep(LOOK_EVERY_S)
            return
        if stage == "train":
            await self._trained(session_id, ends)
            return
        kind: type[Event] = {"turns": TurnPaired, "judging": VerdictReached, "samples": SampleAssembled}[stage]
        await self._written(kind, lambda event: getattr(event, "session_id", None) == session_id, ends)

    async def _trained(self, session_id: str, ends: Any) -> None:
        sample = await self._written(SampleAssembled, lambda e: getattr(e, "session_id", None) == session_id, ends)
        assert isinstance(sample, SampleAssembled)
        plan = await self._written(BatchPlanned, lambda e: sample.sample_id in getattr(e, "sample_ids", ()), ends)
        assert isinstance(plan, BatchPlanned)
        version = plan.policy_version
        await self._written(StepTaken, lambda e: getattr(e, "policy_version", None) == version, ends)

    async def _written(self, kind: type[Event], wanted: Callable[[Event], bool], ends: Any) -> Event:
        topic = topic_of(kind)
        start = {place: offset for place, offset in ends.items() if place.topic == topic}
        async for records in self.log.follow([topic], start):
            for record in records:
                if isinstance(record, Record) and isinstance(record.event, kind) and wanted(record.event):
                    return record.event
        raise AssertionError("a log that is followed has no end")

    def _has_row(self, exchange_id: str) -> bool:
        with psycopg.connect(self.dsn) as connection:
            found = connection.execute("SELECT 1 FROM exchanges WHERE exchange_id = %s", [exchange_id]).fetchone()
        return found is not None


async def _measure(
    folder: Path, bootstrap: str, url: str, sessions: int, turns: int, rounds: int, stages: list[str] | None
) -> dict[str, Any]:
    dsn = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    async with _rig(folder, bootstrap, url, dsn, sessions) as (rig, people):
        began_s = time.monotonic()
        await _talk(people, turns)
        talked_s = time.monotonic() - began_s
        await _settled(rig, sessions * (turns - 1))
        settled_s = time.monotonic() - began_s
        calm_s = await _calm(rig)
        away = {
            stage: {how: [await rig.away(stage, number) for _ in range(rounds)] for how, number in SIGNALS.items()}
            for stage in stages or STAGES
        }
    longest_s = max(one["until_live_s"] for ways in away.values() for lives in ways.values() for one in lives)
    return {
        "exchanges": sessions * turns,
        "talked_s": round(talked_s, 1),
        "settled_s": round(settled_s, 1),
        "answer_to_step_s_in_calm": round(calm_s, 2),
        "away": away,
        "longest_s": longest_s,
    }


async def _calm(rig: Rig) -> float:
    """Return how long it takes from a question to the step that is taken on it, where nothing was stopped."""
    topics = [topic_of(SampleAssembled), topic_of(StepTaken)]
    ends = await rig.log.end_offsets(topics)
    began_s = time.monotonic()
    person = next(rig.people)
    await rig._done("train", person.session_id, await person.ask(), ends)
    return time.monotonic() - began_s


async def _talk(people: list[Person], turns: int) -> None:
    waiting = iter(people)

    async def one_after_the_other() -> None:
        for person in waiting:
            for _ in range(turns):
                await person.ask()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(PEOPLE_AT_ONCE):
            tasks.create_task(one_after_the_other())


async def _settled(rig: Rig, num_samples: int) -> None:
    """Return when all that was said is paired, judged, trained on and in the database."""
    trained = 0
    async with asyncio.timeout(400):
        async for records in rig.log.follow([topic_of(StepTaken)], "earliest"):
            events = [record.event for record in records if isinstance(record, Record)]
            trained += sum(event.num_samples for event in events if isinstance(event, StepTaken))
            if trained >= num_samples:
                break
        while await rig.log.lag("turns") or await rig.log.lag("samples") or await rig.log.lag("project"):
            await asyncio.sleep(0.2)


@asynccontextmanager
async def _rig(
    folder: Path, bootstrap: str, url: str, dsn: str, sessions: int
) -> AsyncIterator[tuple[Rig, list[Person]]]:
    model = await asyncio.to_thread(make_model, folder / "model", context_length_tokens=CONTEXT_TOKENS)
    renderer = load_renderer(model, "qwen3", enable_thinking=False)
    await admin.apply(bootstrap)
    async with contextlib.AsyncExitStack() as stack:
        engine_url = await stack.enter_async_context(serving(engine(renderer, context_length_tokens=CONTEXT_TOKENS)))
        judge_url = await stack.enter_async_context(_judge())
        port = stack.enter_context(reserved())
        settings = Settings(
            environment=False, data_dir=folder, cache_dir=folder / "cache",
            kafka={"bootstrap": bootstrap}, postgres={"url": url},
            engine={"urls": (engine_url,), "model_path": model},
            policy={"renderer": "qwen3", "enable_thinking": False},
            gateway={"port": port},
            judge={"url": judge_url, "votes": 1},
            training={"batch_samples": BATCH, "max_wait_s": 0.5},
        )  # fmt: skip
        parts = {stage: _part(stage, settings, folder) for stage in STAGES}
        keepers = [asyncio.create_task(part.keep()) for part in parts.values()]
        try:
            http = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
            )
            log = await stack.enter_async_context(KafkaLog.connect(bootstrap, client_id="bench"))
            people = [
                Person(session_id=f"open-{number:05d}", http=http, url=f"http://{HOST}:{port}")
                for number in range(sessions)
            ]
            yield Rig(log=log, dsn=dsn, parts=parts, people=itertools.cycle(people)), people
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)


def _part(stage: str, settings: Settings, folder: Path) -> Slot:
    kafka = settings.kafka.model_copy(update={"instance": "bench"})
    config = folder / f"{stage}.json"
    config.write_text(dump(settings.model_copy(update={"kafka": kafka})))
    return Slot(
        argv=(sys.executable, "-m", "clawstream", "--config", str(config), stage),
        log=folder / f"{stage}.log",
    )


@asynccontextmanager
async def _judge() -> AsyncIterator[str]:
    """A judge who likes every answer; yields its address."""

    async def answer(_: web.Request) -> web.Response:
        message = {"role": "assistant", "content": "Well done. \\boxed{1}"}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    app = web.Application(client_max_size=2**24)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        yield f"http://{HOST}:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
