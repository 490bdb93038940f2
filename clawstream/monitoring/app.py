"""The monitor: reads the last hour of the log, then everything that arrives, and answers over HTTP.

GET /windows gives the report as JSON, GET /metrics gives it for Prometheus, GET /healthz says that the monitor runs. A
monitor keeps nothing between runs: each start reads the last hour again. So all metrics are gauges, for the last whole
minute and for the last hour. A metric without a value has no line.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from clawstream.config import MonitorSettings, Settings
from clawstream.errors import PartUnavailable
from clawstream.inference.http_borders import guard_origin
from clawstream.monitoring.hosting import hosted
from clawstream.monitoring.live import Live, MonitorReport, TimeSpan, as_json
from clawstream.monitoring.policy import PolicyBoard
from clawstream.monitoring.status import GROUP, TOPICS, due_of, read_policy, waiting_since
from clawstream.monitoring.windows import KEPT_MINUTES, MINUTE_MS
from clawstream.stream.kafka.client import Broker
from clawstream.stream.kafka.connect import connected
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Commit, PartitionId
from clawstream.stream.stage import now_ms

log = logging.getLogger(__name__)

HOST = "127.0.0.1"  # no key guards the monitor, so no other machine may reach it
Values = Mapping[tuple[str, ...], float | None]

_BY_SPAN: Mapping[str, tuple[str, Callable[[TimeSpan], float | None]]] = {
    "output_tokens_per_second": ("Sampled tokens", lambda span: span.tokens_per_s),
    "mean_score": ("Of the verdicts that have a score", lambda span: span.tally.mean_score),
    "votes_unreadable_share": ("Of the judges' replies", lambda span: span.tally.unreadable_share),
    "votes_failed_share": ("Votes without a reply, of all", lambda span: span.tally.failed_share),
    "steps": ("Optimizer steps", lambda span: span.tally.steps),
    "steps_rejected": ("Steps whose outcome was not published", lambda span: span.tally.steps_rejected),
    "activations": ("Versions taken over by engines", lambda span: span.tally.activations),
    "rejections": ("Versions refused by engines", lambda span: span.tally.rejections),
    "pause_ms_max": ("The longest pause of an engine for new weights", lambda span: span.tally.pause_ms_max),
    "undecodable_records": ("Records that are no event", lambda span: span.tally.undecodable),
}
_BY_KIND: Mapping[str, tuple[str, str, Callable[[TimeSpan], Mapping[str, int]]]] = {
    "exchanges": ("outcome", "Exchanges by what came of them", lambda span: span.tally.exchanges),
    "turns": (
        "outcome",
        "Answers by whether the conversation went on from them",
        lambda span: {"paired": span.tally.turns_paired, "orphaned": span.tally.turns_orphaned},
    ),
    "votes": ("status", "Judges' votes", lambda span: span.tally.votes),
    "samples": (
        "outcome",
        "Samples made, and why others were not",
        lambda span: {"assembled": span.tally.samples, **span.tally.refusals},
    ),
    "refreshed_answers": (
        "outcome",
        "Outcomes of refreshed answers, each with each hint",
        lambda span: span.tally.refreshed,
    ),
}


def exposition(report: MonitorReport) -> bytes:
    """Return the text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(_ReportCollector(report))
    return generate_latest(registry)


class _ReportCollector(Collector):
    def __init__(self, report: MonitorReport) -> None:
        self._report = report

    def collect(self) -> Iterator[GaugeMetricFamily]:
        report = self._report
        spans = {"1m": report.minutes[-2], "60m": report.hour}
        for name, (words, value_of) in _BY_SPAN.items():
            values: Values = {(window,): value_of(span) for window, span in spans.items()}
            yield _family(f"window_{name}", words, ("window",), values)
        for name, (label, words, counts_of) in _BY_KIND.items():
            counts: Values = {
                (window, kind): count for window, span in spans.items() for kind, count in counts_of(span).items()
            }
            yield _family(f"window_{name}", words, ("window", label), counts)
        yield _family("samples_waiting", "Samples in no batch yet", (), {(): report.samples_waiting})
        yield _family("samples_oldest_waiting_seconds", "Age of the oldest", (), {(): report.oldest_waiting_s})
        yield _family("policy_published_version", "The newest", (), {(): report.published_version})
        stands_still: Values = {(): int(report.alarm is not None)}
        yield _family("learning_stands_still", "1 where it does; /windows says why", (), stands_still)
        off_s: Values = {(): None if report.clock_off_ms is None else report.clock_off_ms / 1000}
        yield _family("broker_clock_off_seconds", "Ahead, or behind where negative; 0 where it is believed", (), off_s)
        active: Values = {(engine,): version for engine, version in report.active_versions.items()}
        yield _family("policy_active_version", "What each engine serves", ("engine",), active)
        yield _family("monitor_rebuilt", "1 once the last hour was read", (), {(): int(report.rebuilt)})


def _family(name: str, words: str, labels: tuple[str, ...], values: Values) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"clawstream_{name}", words, labels=labels)
    for of, value in values.items():
        if value is not None:
            family.add_metric(of, value)
    return family


async def serve(settings: Settings, *, stop: asyncio.Event) -> None:
    """Run until `stop`; raises PartUnavailable where the port or the group is taken, or no broker answers."""
    kafka, folder = settings.kafka, settings.data_dir / "monitor"
    broker = Broker(bootstrap=kafka.address, client_id=GROUP, security=kafka)
    board = PolicyBoard(settings.policy.id, due_of(settings.training))
    async with connected(kafka, client_id=GROUP) as kafka_log:
        starts = await _starts(kafka_log, board)
        ends = await kafka_log.end_offsets(TOPICS)
        await kafka_log.put_back(GROUP, {place: Commit(start) for place, start in starts.items()})
    live = Live(
        board, {place: end for place, end in ends.items() if starts[place] < end}, judged=settings.judge.url is not None
    )
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    async with (
        hosted(
            broker,
            TOPICS,
            lambda found: live.receive(found, now_ms()),
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
async def answering(settings: MonitorSettings, report: Callable[[int], MonitorReport]) -> AsyncIterator[int]:
    """Answer requests until the block ends; yield the port."""

    async def windows(_: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(as_json(report(now_ms()))), content_type="application/json")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=exposition(report(now_ms())), headers={"Content-Type": "text/plain; version=0.0.4"})

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


async def _starts(kafka_log: KafkaLog, board: PolicyBoard) -> dict[PartitionId, int]:
    """Return where to begin to read: an hour ago, or at the first sample that no batch has used, if that is earlier."""
    await read_policy(kafka_log, board)
    waiting = await waiting_since(kafka_log, board)
    starts = await kafka_log.offsets_at(TOPICS, now_ms() - KEPT_MINUTES * MINUTE_MS)
    return {place: min(start, waiting.get(place, start)) for place, start in starts.items()}
