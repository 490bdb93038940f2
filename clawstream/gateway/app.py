"""The gateway as a process: what it listens on, what it watches, and how it stops.

The gateway serves once it has read its sessions from the log; then /readyz says which parts are away. A part that is
away leads to a 503 that names it, never to the end of the process.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import aiohttp
import uvicorn
from starlette.types import ASGIApp

from clawstream.config import LOOPBACK, Settings
from clawstream.errors import ConfigError, PartUnavailable
from clawstream.gateway.access.key_file import WatchedKeys
from clawstream.gateway.access.owners import FOLDER as OWNERS
from clawstream.gateway.access.owners import Owners
from clawstream.gateway.access.security import Guard
from clawstream.gateway.answering.admission import Admission
from clawstream.gateway.answering.prompts import PromptMaker
from clawstream.gateway.engines import Engines, ServedEngine
from clawstream.gateway.http.connection import Bounds, connection_class
from clawstream.gateway.http.metrics import Metrics
from clawstream.gateway.http.pages import build_app
from clawstream.gateway.outbox.delivery import Delivery, SealedLog
from clawstream.gateway.outbox.recorder import Recorder
from clawstream.gateway.outbox.spool import Spool
from clawstream.gateway.outbox.spool_file import FOLDER, Fsync, SpoolInUse
from clawstream.gateway.picture_store import PictureStore, Seeing
from clawstream.gateway.sessions import Conversations, SampledAnswers, SessionIndex
from clawstream.gateway.watching import follow_policy, learn_owners, learn_sessions
from clawstream.inference.clients import engine_client, engine_session
from clawstream.inference.model_folder import largest_token_id, num_embeddings, too_small_for
from clawstream.inference.service import Server
from clawstream.rendering.renderer import PromptRenderer
from clawstream.stream.log import Log
from clawstream.stream.stage import now_ms

LOG = logging.getLogger(__name__)
_BACKLOG = 4096
_UNREAD_BYTES = 128 * 1024  # of one connection, in the kernel's send buffer, which would otherwise grow to 4 MiB
_LOOK_AGAIN_S = 0.1
BOUNDS = Bounds()
DRAIN_S = 30.0  # how long running answers may go on after the signal to stop


class GatewayLog(SealedLog, Log, Protocol):
    """The parts of a log that the gateway uses."""

    cluster_id: str | None  # of the Kafka cluster that has the log; None: its broker does not say


async def serve(
    settings: Settings,
    log: GatewayLog,
    *,
    stop: asyncio.Event,
    started: Callable[[str], Awaitable[None]] | None = None,
    fsync: Fsync = os.fsync,
    bounds: Bounds = BOUNDS,
) -> None:
    """Serve until `stop` is set, then finish the answers under way within 30 s; `started` gets the address.

    The spool uses `fsync`.
    """
    policy = settings.policy
    renderer = PromptRenderer.of(policy, settings.engine.base_policy)
    largest_id = _largest_id(settings.engine.base_policy, renderer)
    metrics = Metrics()
    async with (
        engine_session(settings.engine) as session,
        _spool(settings, fsync) as spool,
    ):
        with (
            closing(_owners(settings, log.cluster_id)) as owners,
            _listener(settings.gateway.host, settings.gateway.port) as listener,
        ):
            delivery = Delivery(log, spool, ack_timeout_s=bounds.ack_timeout_s, metrics=metrics, now_ms=now_ms)
            admission = Admission(
                settings=settings.gateway,
                bounds=bounds,
                policy=policy,
                renderer=renderer,
                prompts=PromptMaker(renderer, within_s=bounds.request_timeout_s),
                engines=Engines(
                    policy.id,
                    [
                        _engine(session, url, settings, largest_id, bounds.engine_answers_within_s)
                        for url in settings.engine.addresses
                    ],
                ),
                recorder=Recorder(delivery),
                delivery=delivery,
                sessions=SessionIndex(bounds.index_window_s * 1000),
                owners=owners,
                answers=SampledAnswers(),
                conversations=Conversations(bounds.index_window_s * 1000),
                metrics=metrics,
                seeing=_seeing(settings, renderer),
                always_of_the_policy=settings.samples.off_distribution == "gateway_override",
            )
            keys = _keys(settings)
            guard = Guard.of(settings.gateway, keys, admission.metrics)
            from_ms = now_ms() - bounds.index_window_s * 1000
            learning = learn_sessions(
                log, admission.sessions, admission.answers, admission.conversations, owners,
                policy_id=policy.id, by_key=policy.by_key, from_ms=from_ms, spooled=delivery.waiting(),
            )  # fmt: skip
            if not await _done_unless(stop, learning):
                return
            async with asyncio.TaskGroup() as group:
                watching = (
                    group.create_task(follow_policy(log, admission.engines)),
                    group.create_task(admission.engines.watch()),
                    group.create_task(delivery.run()),
                    group.create_task(owners.run()),
                    group.create_task(learn_owners(log, owners, from_ms)),
                )
                try:
                    await _listen(build_app(admission, guard), listener, bounds, stop, started)
                finally:
                    admission.prompts.close()
                    for task in watching:
                        task.cancel()


async def _done_unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Return whether the work was done before `stop` was set."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        working.cancel()
    with suppress(asyncio.CancelledError):
        await working
        return True
    return False


def _owners(settings: Settings, cluster_id: str | None) -> Owners:
    """Return the owners of this log's sessions."""
    of_cluster = "" if cluster_id is None else f".{quote(cluster_id, safe='')}"
    return Owners(settings.data_dir / OWNERS / f"{settings.kafka.prefix}sessions{of_cluster}.sqlite", now_ms)


@asynccontextmanager
async def _spool(settings: Settings, fsync: Fsync) -> AsyncIterator[Spool]:
    """Yield this gateway's spool, once a gateway that is stopping has let go of it."""
    instance = settings.kafka.instance or f"{settings.gateway.host.replace(':', '_')}-{settings.gateway.port}"
    folder, name = settings.data_dir / FOLDER, f"{settings.kafka.prefix}{instance}"
    max_bytes = settings.gateway.spool_bytes
    clock = asyncio.get_running_loop()
    deadline = clock.time() + DRAIN_S
    with ExitStack() as stack:
        while True:
            try:
                spool = stack.enter_context(Spool.opened(folder, name, max_bytes=max_bytes, fsync=fsync))
                break
            except SpoolInUse:
                if clock.time() >= deadline:
                    raise
                await asyncio.sleep(_LOOK_AGAIN_S)
        yield spool


async def _listen(
    app: ASGIApp,
    listener: socket.socket,
    bounds: Bounds,
    stop: asyncio.Event,
    started: Callable[[str], Awaitable[None]] | None,
) -> None:
    config = uvicorn.Config(
        app,
        loop="none",
        http=connection_class(bounds),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=int(DRAIN_S),
    )
    server = Server(config)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[listener]))
        stopping = group.create_task(stop.wait())
        LOG.info("gateway=listening url=%s", url)
        if started is not None:
            await started(url)
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        stopping.cancel()


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)  # its connections inherit it
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PartUnavailable(
            f"gateway.port {port} on {host} can't be listened on ({error.strerror}); nothing is served. "
            "Stop what uses it, or set gateway.port"
        ) from error
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _keys(settings: Settings) -> WatchedKeys:
    keys = WatchedKeys(settings.keys_file)
    if settings.gateway.host not in LOOPBACK and settings.gateway.api_key is None and not keys.ring().in_force:
        raise ConfigError(
            f"gateway.host {settings.gateway.host} can be reached from outside, and no key of {settings.keys_file} is "
            "in force; nothing is served. Add one (clawstream keys add NAME), or set gateway.api_key"
        )
    return keys


def _seeing(settings: Settings, renderer: PromptRenderer) -> Seeing | None:
    """Return how pictures are taken in; None: the policy, its template or its engines see none."""
    if renderer.sight is None or renderer.picture_id is None or settings.engine.dialect != "sglang":
        return None
    store = PictureStore(settings.pictures_dir)
    return Seeing(sight=renderer.sight, store=store, picture_id=renderer.picture_id)


def _largest_id(model_path: Path, renderer: PromptRenderer) -> int:
    largest_id = largest_token_id(model_path, renderer.marker_ids)
    problem = too_small_for(largest_id, model_path)
    if problem is not None:
        raise ConfigError(
            f"{problem}: the model has no embedding for {renderer.decode((largest_id,))!r}, and an engine may end when "
            "a prompt has it. Nothing is served. Name a folder with the model's own tokenizer in "
            "engine.model_path, or resize the model's embeddings"
        )
    return largest_id


def _engine(
    session: aiohttp.ClientSession, url: str, settings: Settings, largest_id: int, answers_within_s: float
) -> ServedEngine:
    return ServedEngine(
        url=url.rstrip("/"),
        client=engine_client(settings.engine)(session, url, num_token_ids=num_embeddings(settings.engine.base_policy)),
        policy_id=settings.policy.id,
        answers_within_s=answers_within_s,
        largest_token_id=largest_id,
    )
