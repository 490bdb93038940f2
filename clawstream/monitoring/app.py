"""The monitor: reads the last hour, then everything that comes, and answers over HTTP.

GET /windows is the report as JSON, GET /metrics the same for Prometheus, GET /healthz says that the monitor runs. A
monitor keeps nothing between runs: each start reads the last hour again.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import orjson
from aiohttp import web

from clawstream.config import MonitorSettings, Settings
from clawstream.errors import ConfigError, PartUnavailable
from clawstream.inference.origin_guard import guard_origin
from clawstream.monitoring.hosting import hosted
from clawstream.monitoring.live import Live, MonitorReport, as_json
from clawstream.monitoring.metrics import exposition
from clawstream.monitoring.policy import PolicyBoard
from clawstream.monitoring.reading import GROUP, TOPICS, due_of, read_policy, waiting_since
from clawstream.monitoring.windows import KEPT_MINUTES, MINUTE_MS
from clawstream.stream.kafka.client import Broker
from clawstream.stream.kafka.connect import connected, security_of
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.kafka.positions import offsets_at, set_group
from clawstream.stream.log import PartitionId

log = logging.getLogger(__name__)

HOST = "127.0.0.1"  # no key guards the windows, so no other machine may reach them


async def serve(settings: Settings, *, stop: asyncio.Event) -> None:
    """Run until `stop`; raises PartUnavailable where the port, the broker or the group can't be had."""
    kafka, folder = settings.kafka, settings.data_dir / "monitor"
    if kafka.bootstrap is None:
        raise ConfigError("kafka.bootstrap is not set: name a broker, or run `clawstream up`, which starts one")
    broker = Broker(bootstrap=kafka.bootstrap, client_id=GROUP, security=security_of(kafka))
    board = PolicyBoard(settings.policy.id, due_of(settings.training))
    async with connected(kafka, client_id=GROUP) as kafka_log:
        starts = await _starts(broker, kafka.prefix, kafka_log, board)
        ends = await kafka_log.end_offsets(TOPICS)
        await set_group(broker, kafka.prefix, GROUP, starts)
    live = Live(
        board, {place: end for place, end in ends.items() if starts[place] < end}, judged=settings.judge.url is not None
    )
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    async with (
        hosted(
            broker,
            TOPICS,
            lambda found: live.receive(found, _now_ms()),
            group=GROUP,
            prefix=kafka.prefix,
            folder=folder,
        ) as ended,
        answering(settings.monitor, live.report),
    ):
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if ended.done():
            ended.result()


@asynccontextmanager
async def answering(
    settings: MonitorSettings, report: Callable[[int], MonitorReport], now_ms: Callable[[], int] | None = None
) -> AsyncIterator[int]:
    """Answer requests for the length of the block; yield the port."""
    clock = now_ms or _now_ms

    async def windows(_: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(as_json(report(clock()))), content_type="application/json")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=exposition(report(clock())), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(middlewares=[guard_origin])
    app.add_routes([web.get("/windows", windows), web.get("/metrics", metrics), web.get("/healthz", healthz)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        yield await _listen(runner, settings)
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, settings: MonitorSettings) -> int:
    site = web.TCPSite(runner, HOST, settings.port, reuse_address=True)
    try:
        await site.start()
    except OSError as error:
        raise PartUnavailable(
            f"monitor: can't listen on {HOST}:{settings.port} ({error.strerror}); nothing was started. "
            "Stop what listens there, or set monitor.port"
        ) from error
    port: int = runner.addresses[0][1]
    log.info("monitor_ready url=http://%s:%d", HOST, port)
    return port


async def _starts(broker: Broker, prefix: str, kafka_log: KafkaLog, board: PolicyBoard) -> dict[PartitionId, int]:
    """Return where to read from: an hour ago; samples, from the first that no batch has used up."""
    await read_policy(kafka_log, board)
    waiting = await waiting_since(kafka_log, board)
    hour_ago_ms = _now_ms() - KEPT_MINUTES * MINUTE_MS
    starts = await offsets_at(broker, prefix, await kafka_log.begin_offsets(TOPICS), hour_ago_ms)
    return {place: min(start, waiting.get(place, start)) for place, start in starts.items()}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
