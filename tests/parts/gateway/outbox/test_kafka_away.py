"""A real broker stops answering, is killed, comes back; a gateway is killed while records are on its disk alone."""

import asyncio
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from clawstream.events import ExchangeCompleted, FeedbackGiven
from clawstream.gateway.outbox.spool_file import spools_in
from clawstream.local.servers.kafka import EmbeddedKafka
from clawstream.local.servers.server_process import reserved
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.stage import Record
from clawstream.stream.topics import EXCHANGES, FEEDBACK
from tests.parts.gateway.outbox.test_promises import spooled_records
from tests.parts.gateway.running_gateway import RunningGateway, running_gateway

pytestmark = pytest.mark.slow

SESSIONS = 16
BACK_WITHIN_S = 60.0
OTHER = [{"role": "user", "content": "What is 5+5?"}]


@pytest.fixture
def broker_dir(tmp_path: Path) -> Path:
    return tmp_path / "kafka"


@pytest.fixture
def broker(broker_dir: Path) -> Iterator[EmbeddedKafka]:
    """A broker of the test's own, to be stopped at will."""
    with EmbeddedKafka(broker_dir, open_to_all=True) as started:
        yield started


@pytest.fixture
async def log(broker: EmbeddedKafka) -> AsyncIterator[KafkaLog]:
    await admin.apply(broker.bootstrap)
    async with KafkaLog.connect(broker.bootstrap, client_id="gateway") as connected:
        yield connected


def process_of(broker_dir: Path) -> psutil.Process:
    """The broker's JVM."""
    [found] = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.name() == "java" and process.cwd() == str(broker_dir)
    ]
    return found


@contextmanager
def again(command: Sequence[str], broker_dir: Path) -> Iterator[None]:
    """The broker that was killed, on its old port, which is nobody else's while old connections linger."""
    started = subprocess.Popen(command, cwd=broker_dir, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        started.kill()
        started.wait()


@dataclass(slots=True, kw_only=True)
class People:
    """Sessions that go on asking, and what each was answered, in order."""

    gateway: RunningGateway
    answered: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    failed: list[object] = field(default_factory=list)
    stop: bool = False

    async def talk(self, session_id: str) -> None:
        """Ask until told to stop."""
        while not self.stop:
            response = await self.gateway.chat(stream=True, session_id=session_id)
            if response.status != 200 or response.finish_reasons != ["stop"] or not response.done:
                self.failed.append(response)
            self.answered[session_id].append(response.events[0]["id"].removeprefix("chatcmpl-"))

    async def each_had(self, more: int) -> None:
        """Return once each session was answered so often again."""
        wanted = {name: len(self.answered[name]) + more for name in map(str, range(SESSIONS))}

        async def had() -> bool:
            return all(len(self.answered[name]) >= count for name, count in wanted.items())

        async with asyncio.timeout(BACK_WITHIN_S):
            while not await had():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def talking(gateway: RunningGateway) -> AsyncIterator[People]:
    """Sixteen sessions that talk for the length of the block."""
    people = People(gateway=gateway)
    async with asyncio.TaskGroup() as tasks:
        for name in map(str, range(SESSIONS)):
            tasks.create_task(people.talk(name))
        try:
            yield people
        finally:
            people.stop = True


async def drained(gateway: RunningGateway) -> None:
    """Return once nothing waits in the spool."""
    async with asyncio.timeout(BACK_WITHIN_S):
        while await spooled_records(gateway):
            await asyncio.sleep(0.05)


async def goes_straight(gateway: RunningGateway) -> None:
    """Return once an answer was not put into the spool: some are, until Kafka is known to be quick."""

    async def spooled() -> str:
        _, metrics = await gateway.get("/metrics")
        return next(line for line in metrics.splitlines() if line.startswith("clawstream_spooled_records_total"))

    async with asyncio.timeout(BACK_WITHIN_S):
        before = ""
        while (now := await spooled()) != before:
            before = now
            assert (await gateway.chat()).status == 200


async def firsts(log: KafkaLog) -> dict[str, list[str]]:
    """The exchanges of each session, the first copy of each; copies are equal."""
    found: dict[str, ExchangeCompleted] = {}
    async for records in log.follow((EXCHANGES,), until_end=True):
        for record in records:
            assert isinstance(record, Record)
            assert isinstance(record.event, ExchangeCompleted)
            assert found.setdefault(record.event.exchange_id, record.event) == record.event
    sessions: dict[str, list[str]] = defaultdict(list)
    for event in found.values():
        sessions[event.session_id].append(event.exchange_id)
    return sessions


@pytest.mark.timeout(240)
async def test_streams_go_on_while_the_broker_is_stopped_or_killed_and_all_of_it_is_on_the_log_in_order(
    tokenizer_folder: Path, broker_dir: Path, log: KafkaLog
) -> None:
    async with running_gateway(tokenizer_folder, log=log) as gateway:
        gateway.engine.token_delay_s = 0.002
        async with talking(gateway) as people:
            await people.each_had(3)
            process_of(broker_dir).suspend()
            await people.each_had(20)
            assert await spooled_records(gateway) >= SESSIONS * 10
            process_of(broker_dir).resume()
            await people.each_had(5)
            killed = process_of(broker_dir)
            command = killed.cmdline()
            killed.kill()
            await people.each_had(20)
            assert await spooled_records(gateway) >= SESSIONS * 10
            with again(command, broker_dir):
                await people.each_had(20)
                people.stop = True
                await drained(gateway)
                on_log = await firsts(log)
                await goes_straight(gateway)
    assert people.failed == []
    assert on_log == people.answered


@pytest.mark.timeout(240)
async def test_a_gateway_killed_with_records_in_its_spool_loses_none_to_the_next(
    tokenizer_folder: Path, broker: EmbeddedKafka, broker_dir: Path, log: KafkaLog, tmp_path: Path
) -> None:
    data_dir = tmp_path / "data"
    async with running_gateway(tokenizer_folder) as scripted:  # for its engine
        with reserved() as port:
            pass
        config = configured(tmp_path, broker, scripted, tokenizer_folder, port)
        gateway = replace(scripted, url=f"http://127.0.0.1:{port}")
        async with process(config):
            await until_served(gateway)
            before = await gateway.chat(session_id="s")
            await drained(gateway)  # a broker's first acknowledgement is late
            process_of(broker_dir).suspend()
            spooled = [await gateway.chat(session_id="s") for _ in range(5)]
            thumb = {"response_id": before.body["id"], "thumb": "up"}
            async with gateway.client.post(f"{gateway.url}/v1/feedback", json=thumb) as given:
                assert given.status == 201
            unnamed = await gateway.chat(OTHER)
            assert await spooled_records(gateway) == 7
        assert list(spools_in(data_dir)) == [f"127.0.0.1-{port}"]
        process_of(broker_dir).resume()
        async with process(config):
            await until_served(gateway)
            history = [*OTHER, unnamed.body["choices"][0]["message"], {"role": "user", "content": "And?"}]
            after = [await gateway.chat(session_id="s"), await gateway.chat(history)]
            await drained(gateway)
            on_log = await firsts(log)
            (feedback,) = [
                record.event
                async for records in log.follow((FEEDBACK,), until_end=True)
                for record in records
                if isinstance(record, Record) and isinstance(record.event, FeedbackGiven)
            ]
        assert spools_in(data_dir) == {}
    responses = [before, *spooled, after[0]]
    assert [response.status for response in responses] == [200] * 7
    assert on_log["s"] == [response.body["id"].removeprefix("chatcmpl-") for response in responses]
    assert feedback.turn_id == on_log["s"][0]
    assert after[1].headers["x-session-id"] == unnamed.headers["x-session-id"]
    assert len(on_log[unnamed.headers["x-session-id"]]) == 2


@pytest.mark.timeout(240)
async def test_a_gateway_that_is_started_while_kafka_is_away_waits_and_serves_once_it_is_there(
    tokenizer_folder: Path, broker: EmbeddedKafka, broker_dir: Path, tmp_path: Path
) -> None:
    await admin.apply(broker.bootstrap)
    killed = process_of(broker_dir)
    command = killed.cmdline()
    killed.kill()
    killed.wait()
    said = tmp_path / "said"
    async with running_gateway(tokenizer_folder) as scripted:
        with reserved() as port:
            pass
        config = configured(tmp_path, broker, scripted, tokenizer_folder, port)
        gateway = replace(scripted, url=f"http://127.0.0.1:{port}")
        async with process(config, said) as started, asyncio.timeout(BACK_WITHIN_S):
            while said.read_text().count("kafka=away state=waiting") < 2:
                await asyncio.sleep(0.1)
            with again(command, broker_dir):
                await until_served(gateway)
                assert (await gateway.chat()).status == 200
            assert started.returncode is None
        last = tmp_path / "last"
        async with process(config, last) as started, asyncio.timeout(BACK_WITHIN_S):
            while "kafka=away state=waiting" not in last.read_text():
                await asyncio.sleep(0.1)
            started.terminate()
            assert await started.wait() == 0
    assert "Traceback" not in said.read_text() + last.read_text()


def configured(folder: Path, broker: EmbeddedKafka, scripted: RunningGateway, model_path: Path, port: int) -> Path:
    """The settings' file of a gateway as a process."""
    config = folder / "clawstream.toml"
    config.write_text(
        f'environment = false\ndata_dir = "{folder / "data"}"\n[kafka]\nbootstrap = "{broker.bootstrap}"\n'
        f'[engine]\nurls = ["{scripted.engine_url}"]\nmodel_path = "{model_path}"\n'
        f'[policy]\nrenderer = "qwen3"\n[gateway]\nport = {port}\n'
    )
    return config


@asynccontextmanager
async def process(config: Path, said: Path | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    """A gateway as a process, killed at the end of the block; its lines go to `said`."""
    argv = [sys.executable, "-m", "clawstream", "-c", str(config), "gateway"]
    with nullcontext() if said is None else said.open("ab") as lines:
        started = await asyncio.create_subprocess_exec(*argv, stderr=lines)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def until_served(gateway: RunningGateway) -> None:
    """Return once the process answers and has its engine."""

    async def ready() -> bool:
        try:
            return await gateway.ready()
        except OSError:
            return False

    async with asyncio.timeout(BACK_WITHIN_S):
        while not await ready():
            await asyncio.sleep(0.1)
