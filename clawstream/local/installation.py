"""One installation on one machine: a broker and a database, its policy's base on the log, and every part as a process.

`installation(settings)` is the composition root of `clawstream up` and of the demo. While it runs, other commands find
it through its data folder (running.py).
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from clawstream.config import LOOPBACK, KafkaSettings, PostgresSettings, Settings, dump, inherited_environment
from clawstream.inference.http_engine import LOADS_WITHIN_S
from clawstream.inference.model_folder import base_in, naming_event, refuse_other
from clawstream.local.running import Addresses, alone_on, announced, settings_file
from clawstream.local.servers.accounts import write_private
from clawstream.local.servers.kafka import EmbeddedKafka
from clawstream.local.servers.postgres import EmbeddedPostgres
from clawstream.local.servers.server_process import HOST, answers, reserved
from clawstream.local.supervisor import Part, Patience, Supervisor, keep
from clawstream.projections import database
from clawstream.stream import topics
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.connect import connected
from clawstream.stream.log import EventLog, policy_events

log = logging.getLogger(__name__)
STAGES = ("turns", "judging", "heuristics", "samples", "refresh", "groups", "train", "weights", "project", "monitor")
_PATIENCE = Patience(ready_within_s=LOADS_WITHIN_S)  # the gateway is ready once an engine is


async def name_base(policy_log: EventLog, settings: Settings) -> None:
    """Write the base of the settings' policy to the log, if the log names none yet.

    Raises OtherBase where the policy began with another one, ConfigError where the folder can't be read.
    """
    policy_id = settings.policy.id
    base = await asyncio.to_thread(base_in, settings.engine.base_policy, settings.cache_dir)
    events, now_ms = await policy_events(policy_log, topics.POLICY, policy_id), time.time_ns() // 1_000_000
    named = naming_event(policy_id, base, events, checkpoints_dir=settings.checkpoints_dir, now_ms=now_ms)
    if named is None:
        return
    await policy_log.append([named])
    events = await policy_events(policy_log, topics.POLICY, policy_id)
    refuse_other(policy_id, base, events)  # another part may have been quicker
    log.info("base_named policy=%s path=%s model=%s", policy_id, base.path, (base.model_sha256 or "unseen")[:12])


Say = Callable[[str], None]
StartServer = Callable[[EmbeddedKafka | EmbeddedPostgres], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """A running installation."""

    settings: Settings  # with every address filled in
    addresses: Addresses
    supervisor: Supervisor


@contextlib.asynccontextmanager
async def installation(
    settings: Settings,
    *,
    model_path: Path,
    say: Say,
    fresh: bool = False,
    extra_parts: Sequence[Part] = (),
) -> AsyncIterator[Installation]:
    """Run every part until the block ends, on topics and tables that are made or brought up to date first.

    Raises PartUnavailable naming the part that did not come up, with the end of its log.
    """
    with contextlib.ExitStack() as servers:
        servers.enter_context(alone_on(settings.data_dir))
        filled = _with_ports(settings, model_path, servers)  # first, so that a taken port is reported at once
        config = settings_file(filled.data_dir)  # every part reads this file, whatever settings this process was given
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as http,
            _own_servers(servers, say) as start,  # they are kept running until all parts have ended
            Supervisor(filled.data_dir, environment=inherited_environment(), say=say, patience=_PATIENCE) as supervisor,
        ):
            engines = [] if settings.engine.urls else [_part("engine", config, http, f"{filled.engine.urls[0]}/health")]
            async with contextlib.AsyncExitStack() as loading:
                if settings.kafka.bootstrap is None:  # the engine loads while our own broker starts: it needs neither
                    write_private(config, dump(_resolved(filled)))
                    await loading.enter_async_context(_meanwhile(supervisor.start(engines)))
                    engines = []
                filled = await _with_servers(filled, start, fresh)
                addresses = addresses_in(filled)
                async with connected(filled.kafka, client_id="base") as log_of_policy:
                    await name_base(log_of_policy, filled)
                say("topics and tables are in place; starting the parts")
                servers.enter_context(announced(filled.data_dir, addresses))
                write_private(config, dump(_resolved(filled)))
                # Each part waits by itself for what it needs; the three groups are stopped in reverse order.
                await asyncio.gather(
                    supervisor.start([*engines, *extra_parts]),
                    supervisor.start([_part(name, config, http) for name in _stages(settings)]),
                    supervisor.start([_part("gateway", config, http, f"{addresses.gateway}{_ready_page(settings)}")]),
                )
            try:
                yield Installation(settings=filled, addresses=addresses, supervisor=supervisor)
            finally:
                say("stopping: the gateway first, then the stages, the engine and the servers")


@contextlib.asynccontextmanager
async def _meanwhile(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` beside the block and wait for it at the block's end; cancel it where the block fails."""
    task = asyncio.create_task(work)
    try:
        yield
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _ready_page(settings: Settings) -> str:
    """Return the page that tells whether the gateway serves; /readyz also says why not, but may need a key."""
    return "/readyz" if settings.gateway.host in LOOPBACK else "/healthz/ready"


def _stages(settings: Settings) -> list[str]:
    """Return the stages that this installation runs."""
    absent = {
        "judging": settings.judge.url is None,
        "heuristics": settings.rewards.heuristic_function is None,
        "refresh": not settings.training.refreshes,
        "groups": settings.training.method != "stepwise",
        "train": settings.weights.url is not None,
    }
    return [stage for stage in STAGES if not absent.get(stage)]


@contextlib.asynccontextmanager
async def _own_servers(servers: contextlib.ExitStack, say: Say) -> AsyncIterator[StartServer]:
    """Yield a function that starts a server of ours and has it restarted whenever it ends, while the block runs."""
    tasks: list[asyncio.Task[None]] = []

    async def start(server: EmbeddedKafka | EmbeddedPostgres) -> None:
        say(f"starting {type(server).__name__.removeprefix('Embedded')}")
        await asyncio.to_thread(servers.enter_context, server)
        tasks.append(asyncio.create_task(keep(server, say=say)))

    try:
        yield start
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _with_servers(settings: Settings, start: StartServer, fresh: bool) -> Settings:
    """Start the servers that are not configured, side by side; return the settings with both addresses.

    Missing topics and tables are made; existing ones are kept.
    """
    found = await asyncio.gather(
        _with_broker(settings, start, fresh),
        _with_database(settings, start, fresh),
        return_exceptions=True,  # a server that is still starting is waited for, so that it is stopped
    )
    kafka, postgres = found
    if isinstance(kafka, BaseException):
        raise kafka
    if isinstance(postgres, BaseException):
        raise postgres
    return settings.model_copy(update={"kafka": kafka, "postgres": postgres})


async def _with_broker(settings: Settings, start: StartServer, fresh: bool) -> KafkaSettings:
    kafka = settings.kafka
    if kafka.bootstrap is None:
        broker = EmbeddedKafka(settings.data_dir / "kafka", fresh=fresh, cache_dir=settings.cache_dir)
        await start(broker)
        kafka = kafka.model_copy(update=broker.access)
    for change in await admin.apply(kafka.address, kafka.prefix, security=kafka):
        log.info("topics %s", change)
    return kafka


async def _with_database(settings: Settings, start: StartServer, fresh: bool) -> PostgresSettings:
    postgres = settings.postgres
    if postgres.url is None:
        own = EmbeddedPostgres(settings.data_dir / "postgres", fresh=fresh)
        await start(own)
        postgres = PostgresSettings.model_validate({"url": own.url})
    assert postgres.url is not None
    await asyncio.to_thread(database.upgrade, postgres.url.get_secret_value())
    return postgres


def _with_ports(settings: Settings, model_path: Path, servers: contextlib.ExitStack) -> Settings:
    """Return the settings with a real port wherever 0 asked for any, kept free for the part that gets it."""

    def kept(host: str, port: int, setting: str) -> int:
        return servers.enter_context(reserved(port or None, setting=setting)) if host == HOST else port

    engine: dict[str, Any] = {"model_path": model_path}
    if not settings.engine.urls:
        port = kept(HOST, settings.engine.port, "engine.port")
        engine |= {"port": port, "urls": (f"http://{HOST}:{port}",)}
    return settings.model_copy(
        update={
            "engine": settings.engine.model_copy(update=engine),
            "gateway": settings.gateway.model_copy(
                update={"port": kept(settings.gateway.host, settings.gateway.port, "gateway.port")}
            ),
            "monitor": settings.monitor.model_copy(update={"port": kept(HOST, settings.monitor.port, "monitor.port")}),
        }
    )


def _resolved(settings: Settings) -> Settings:
    """Return the settings for the parts, in which nothing is left to choose."""
    instance = settings.kafka.instance or f"{socket.gethostname()}-{settings.gateway.port}"
    return settings.model_copy(
        update={
            "data_dir": settings.data_dir.absolute(),
            "cache_dir": settings.cache_dir.absolute(),
            "kafka": settings.kafka.model_copy(update={"instance": instance}),
        }
    )


def addresses_in(settings: Settings) -> Addresses:
    """Return where the parts of an installation with these whole settings are, as seen from this machine."""
    url = settings.postgres.url
    assert settings.kafka.bootstrap is not None
    assert url is not None
    return Addresses(
        supervisor_pid=os.getpid(),
        kafka=settings.kafka.bootstrap,
        postgres=url.get_secret_value(),
        engines=settings.engine.urls or (f"http://127.0.0.1:{settings.engine.port}",),
        gateway=settings.gateway.local_url,
        monitor=f"http://{HOST}:{settings.monitor.port}",
    )


def _part(command: str, config: Path, http: aiohttp.ClientSession, health: str | None = None) -> Part:
    argv = (sys.executable, "-m", "clawstream", "--config", str(config), command)
    return Part(name=command, command=argv, missing=None if health is None else answers(http, health))
