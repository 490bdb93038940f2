"""The monitor on a real broker: what it shows is what is on the log, again after each start."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from clawstream.config import KafkaSettings, MonitorSettings, Settings
from clawstream.errors import ConfigError, PartUnavailable
from clawstream.events import Event, VoteStatus
from clawstream.local.servers.server_process import reserved
from clawstream.monitoring.app import answering, serve
from clawstream.monitoring.live import Live
from clawstream.monitoring.policy import PolicyBoard
from clawstream.monitoring.status import TOPICS, status
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.admin import set_group
from clawstream.stream.kafka.client import Broker
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Commit
from clawstream.stream.stage import DAY_MS
from clawstream.stream.topics import EXCHANGES, VOTES, all_topics
from tests.sessions import Session, user
from tests.unit.monitoring.said import activated, plan, published, sample, verdict, vote

WITHIN_S = 40.0


@dataclass(frozen=True)
class Site:
    """An installation's topics, and who writes to them."""

    settings: Settings
    log: KafkaLog

    @property
    def bootstrap(self) -> str:
        assert self.settings.kafka.bootstrap is not None
        return self.settings.kafka.bootstrap

    @property
    def prefix(self) -> str:
        return self.settings.kafka.prefix

    async def write(self, events: Sequence[Event]) -> None:
        await self.log.append(events)

    async def topics(self) -> set[str]:
        client = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await client.start()
        found = {name for name in await client.list_topics() if name.startswith(self.prefix)}
        await client.close()
        return found

    async def let_writers_date(self) -> None:
        """The topic's records have the times that writers give them, as if those were the broker's clock."""
        resource = ConfigResource(
            ConfigResourceType.TOPIC,
            self.prefix + EXCHANGES,
            configs={"message.timestamp.type": "CreateTime", "message.timestamp.after.max.ms": str(30 * DAY_MS)},
        )
        client = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await client.start()
        try:
            await client.alter_configs([resource])
        finally:
            await client.close()

    async def write_dated(self, number: int, off_ms: int) -> None:
        now_ms = time.time_ns() // 1_000_000
        exchange = replace(Session(f"session-{number}").ask([user("hi")], "hello"), finished_at_ms=now_ms)
        sealed = self.log.seal(exchange)
        async with AIOKafkaProducer(bootstrap_servers=self.bootstrap) as producer:
            await producer.send_and_wait(
                self.prefix + EXCHANGES, sealed.value, sealed.key,
                partition=0, timestamp_ms=now_ms + off_ms, headers=list(sealed.headers),
            )  # fmt: skip

    async def write_garbage(self, value: bytes | None) -> None:
        async with AIOKafkaProducer(bootstrap_servers=self.bootstrap) as producer:
            await producer.send_and_wait(self.prefix + VOTES, value, key=b"s")


@pytest.fixture
async def site(kafka_bootstrap: str, topic_prefix: str, tmp_path: Path) -> AsyncIterator[Site]:
    await admin.apply(kafka_bootstrap, topic_prefix)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log:
        with reserved() as port:
            yield Site(
                Settings(
                    data_dir=tmp_path,
                    kafka=KafkaSettings(bootstrap=kafka_bootstrap, prefix=topic_prefix),
                    monitor=MonitorSettings(port=port),
                ),
                log,
            )


@asynccontextmanager
async def monitoring(settings: Settings) -> AsyncIterator[Callable[[str], Any]]:
    """Run the monitor for the length of the block; yield what asks it."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks, aiohttp.ClientSession(f"http://127.0.0.1:{settings.monitor.port}") as http:

        async def ask(path: str) -> Any:
            async with http.get(path) as response:
                assert response.status == 200
                return await (response.json() if path == "/windows" else response.text())

        tasks.create_task(serve(settings, stop=stop))
        try:
            yield ask
        finally:
            stop.set()


async def until(ask: Callable[[str], Any], holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first report for which `holds`."""
    told: dict[str, Any] = {}
    try:
        async with asyncio.timeout(WITHIN_S):
            while True:
                try:
                    told = await ask("/windows")
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.05)
                    continue
                if holds(told):
                    return told
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"not within {WITHIN_S} s; the last report: {told}") from None


@pytest.mark.slow
async def test_the_monitor_shows_the_last_hour_follows_what_comes_and_creates_no_topic(site: Site) -> None:
    session = Session()
    samples = [sample(str(number)) for number in range(3)]
    await site.write([session.ask([user("hi")], "hello"), session.fail([user("hi"), user("you")])])
    await site.write([vote(0), vote(1), vote(1), vote(2, VoteStatus.FAILED), verdict("a", -1), verdict("b", None)])
    await site.write([*samples, published(0), published(1), activated(0), plan(1, (samples[0],), {})])
    await site.write_garbage(b"no event")
    await site.write_garbage(None)
    before = await site.topics()

    async with monitoring(site.settings) as ask:
        told = await until(ask, lambda told: bool(told["rebuilt"]))
        hour = told["hour"]
        assert hour["exchanges"] == {"client_gone": 1, "completed": 1}
        assert hour["votes"] == {"failed": 1, "readable": 2}, "a vote that was written twice counts once"
        assert (hour["mean_score"], hour["verdicts"], hour["undecodable"]) == (-1.0, 2, 2)
        assert (told["samples_waiting"], hour["samples"]) == (2, 3)
        assert (told["published_version"], told["active_versions"]) == (1, {"http://engine": 0})
        assert sum(minute["samples"] for minute in told["minutes"]) == 3

        await site.write([activated(1, pause_ms=7.5, at_ms=1)])
        told = await until(ask, lambda told: told["hour"]["activations"] == 2)
        assert (told["active_versions"], told["hour"]["pause_ms_max"]) == ({"http://engine": 1}, 7.5)
        metrics = await ask("/metrics")
        assert 'clawstream_window_exchanges{outcome="client_gone",window="60m"} 1.0' in metrics
        assert "clawstream_samples_waiting 2.0" in metrics
        assert await site.topics() == before

    async with monitoring(site.settings) as ask:
        again = await until(ask, lambda told: bool(told["rebuilt"]))
        assert again["hour"]["votes"] == hour["votes"]
        assert again["samples_waiting"] == 2
        assert again["active_versions"] == {"http://engine": 1}


@pytest.mark.slow
async def test_a_brokers_clock_that_is_wrong_is_an_alarm_of_monitor_and_status_until_it_is_right(site: Site) -> None:
    await site.let_writers_date()
    kafka = site.settings.kafka

    async def alarms(ask: Callable[[str], Any], off_ms: int) -> dict[str, Any]:
        told = await until(
            ask, lambda told: told["clock_off_ms"] is not None and (told["clock_off_ms"] > 0) == (off_ms > 0)
        )
        found = await status(kafka, policy_id="policy", optional=(), monitor_url=None)
        assert found.log is not None, found.problems
        assert (found.log.clock_alarm is None) == (told["clock_alarm"] is None)
        return told

    async with monitoring(site.settings) as ask:
        for number, off_ms in enumerate((0, 3 * DAY_MS, 0)):
            await site.write_dated(number, off_ms)
            told = await alarms(ask, off_ms)
            assert ("259,200 s ahead" in str(told["clock_alarm"])) == (off_ms > 0)
        assert told["hour"]["exchanges"] == {"completed": 3}
        assert "clawstream_broker_clock_off_seconds 0.0" in await ask("/metrics")


@pytest.mark.slow
async def test_a_group_that_somebody_reads_in_is_refused_by_name(site: Site) -> None:
    broker = Broker(bootstrap=site.bootstrap, client_id="test", prefix=site.prefix)
    starts = {place: Commit(offset) for place, offset in (await site.log.begin_offsets([VOTES])).items()}
    async with monitoring(site.settings) as ask:
        await until(ask, lambda told: bool(told["rebuilt"]))
        with pytest.raises(PartUnavailable, match=r"monitor: its positions were not set .* it has 1 members already"):
            await set_group(broker, "monitor", starts, within_s=0.1)


async def test_a_time_is_found_between_two_records_and_the_end_after_the_last(site: Site) -> None:
    await site.write([vote(0)])
    await site.write([vote(1)])
    stamps = [
        (record.partition, record.offset, record.timestamp_ms)
        async for records in site.log.follow([VOTES], until_end=True)
        for record in records
    ]
    (partition, _, first_ms), (_, second, second_ms) = stamps
    expected = second if second_ms > first_ms else 0
    found = await site.log.offsets_at([VOTES], first_ms + 1)
    assert {place.partition: at for place, at in found.items() if at} == ({partition: expected} if expected else {})
    after = await site.log.offsets_at([VOTES], second_ms + 1)
    assert {place.partition: at for place, at in after.items() if at} == {partition: 2}


async def test_a_port_that_is_taken_is_named() -> None:
    live = Live(PolicyBoard("policy"), {})
    async with answering(MonitorSettings(port=0), live.report) as port:
        with pytest.raises(PartUnavailable, match=f"monitor: can't listen on 127.0.0.1:{port}"):
            async with answering(MonitorSettings(port=port), live.report):
                pass


async def test_without_a_broker_in_the_settings_the_monitor_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kafka\.bootstrap is not set"):
        await serve(Settings(data_dir=tmp_path), stop=asyncio.Event())


def test_every_topic_that_the_monitor_reads_is_one_of_ours() -> None:
    assert {topic.name for topic in all_topics()} >= set(TOPICS)
