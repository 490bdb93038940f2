"""A replay's workers as processes, each with its own connection to the broker.

A worker that ends without a result ends the replay. A replay started again under its name gives the same events.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import uvloop

from clawstream.config import Settings
from clawstream.errors import OperatorError, PartUnavailable
from clawstream.events import ReplayStarted, VotesFrom
from clawstream.local.servers.server_process import die_with_parent
from clawstream.replay.running import shares
from clawstream.replay.stages import hosted, judge_settings
from clawstream.replay.work import GROUP_BYTES, ReplayProgress, ReplayWorker, WorkerResult, summed
from clawstream.stream.kafka.kafka_log import KafkaLog

log = logging.getLogger(__name__)

_JOIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """What one worker is to do."""

    settings: Settings
    started: ReplayStarted
    numbers: Sequence[int]
    exchanges_per_s: float | None


def prepare(module: str) -> None:
    """Start a process that imports `module`; the workers are forks of it, and so start faster."""
    get_context("forkserver").set_forkserver_preload([module])
    forkserver.ensure_running()


async def in_processes(
    settings: Settings,
    started: ReplayStarted,
    *,
    num_workers: int,
    exchanges_per_s: float | None,
    on_progress: Callable[[ReplayProgress], None],
) -> list[WorkerResult]:
    """Run the workers and return each one's result; `on_progress` gets the progress of all together."""
    dealt = shares(started, num_workers)
    rate = None if exchanges_per_s is None else exchanges_per_s / len(dealt)
    known: dict[int, ReplayProgress] = {}  # by worker

    def telling(number: int) -> Callable[[ReplayProgress], None]:
        def tell(news: ReplayProgress) -> None:
            known[number] = news
            on_progress(summed(known.values()))

        return tell

    running: list[tuple[BaseProcess, Connection[object, object]]] = []
    try:
        for share in dealt:
            job = WorkerJob(settings=settings, started=started, numbers=share, exchanges_per_s=rate)
            running.append(await asyncio.to_thread(_start, job))
        hearing = [
            asyncio.to_thread(_hear, process, heard, telling(number)) for number, (process, heard) in enumerate(running)
        ]
        return await asyncio.gather(*hearing)
    finally:
        for process, _ in running:
            process.terminate()
            process.join(_JOIN_S)


def _start(job: WorkerJob) -> tuple[BaseProcess, "Connection[object, object]"]:
    context = get_context("forkserver")
    heard, tell = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(job, tell), daemon=True)
    process.start()
    tell.close()
    return process, heard


def _hear(
    process: BaseProcess, heard: "Connection[object, object]", on_news: Callable[[ReplayProgress], None]
) -> WorkerResult:
    while True:
        try:
            news = heard.recv()
        except EOFError as error:
            process.join(_JOIN_S)
            raise PartUnavailable(
                f"a worker of the replay ended with status {process.exitcode} before its work was done. Start the "
                "replay again under its name; it writes the same events again"
            ) from error
        if isinstance(news, WorkerResult):
            return news
        if isinstance(news, OperatorError):
            raise news
        assert isinstance(news, ReplayProgress), news
        on_news(news)


def _main(job: WorkerJob, tell: "Connection[object, object]") -> None:
    die_with_parent()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            outcome: object = runner.run(_work(job, tell))
        except OperatorError as error:
            outcome = error
    tell.send(outcome)


async def _work(job: WorkerJob, tell: "Connection[object, object]") -> WorkerResult:
    from clawstream.rendering.renderer import PromptRenderer

    settings, kafka = job.settings, job.settings.kafka
    renderer = PromptRenderer.of(settings.policy, settings.engine.base_policy)
    async with AsyncExitStack() as stack:
        kafka_log = await stack.enter_async_context(
            KafkaLog.connect(
                kafka.address, prefix=kafka.prefix, client_id="replay", security=kafka, batch_bytes=GROUP_BYTES
            )
        )
        judge = None
        if job.started.votes_from is VotesFrom.NEW:
            from clawstream.judging.stage import judge_at

            judge = await stack.enter_async_context(judge_at(judge_settings(settings.judge, job.started)))
        stages, asking = hosted(settings, job.started, renderer, judge)
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)  # states are trees of tuples and mappings; next to nothing is a cycle
        worker = ReplayWorker(
            job.started, kafka_log, stages, judging=asking, exchanges_per_s=job.exchanges_per_s, on_progress=tell.send
        )
        began_s, cpu_s = time.perf_counter(), time.process_time()
        outcome = await worker.run(job.numbers)
        log.info(
            "worker=done replay=%s partitions=%s exchanges=%d seconds=%.2f cpu_s=%.2f starting_cpu_s=%.2f",
            job.started.replay,
            ",".join(map(str, job.numbers)),
            outcome.progress.num_exchanges,
            time.perf_counter() - began_s,
            time.process_time() - cpu_s,
            cpu_s,
        )
        return outcome
