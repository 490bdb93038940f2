"""The gateway as a process: what it listens on, what it watches, and how it stops.

The one rule: it serves from the first second and says on /readyz what is missing; a part that is away is a 503 that
names it, never a process that does not start.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import aiohttp
import uvicorn
from starlette.types import ASGIApp

from clawstream.config import Settings
from clawstream.errors import ConfigError, PartUnavailable
from clawstream.gateway.admission import Admission, epoch_ms
from clawstream.gateway.engines import Engines, ServedEngine
from clawstream.gateway.metrics import Metrics
from clawstream.gateway.pages import build_app
from clawstream.gateway.recorder import Appends, Recorder
from clawstream.gateway.sessions import SessionIndex
from clawstream.gateway.watching import Follows, follow_policy, learn_sessions
from clawstream.inference.rendering import PromptRenderer
from clawstream.inference.sglang import SglangEngine

LOG = logging.getLogger(__name__)
DRAIN_S = 30.0  # how long running answers may go on after the signal to stop


class GatewayLog(Appends, Follows, Protocol):
    """The parts of a log that the gateway uses."""


async def serve(
    settings: Settings,
    log: GatewayLog,
    *,
    stop: asyncio.Event,
    started: Callable[[str], Awaitable[None]] | None = None,
) -> None:
    """Serve until `stop` is set and the answers under way are over, for at most 30 s; `started` gets the address."""
    renderer = PromptRenderer.load(_model_path(settings), settings.policy.renderer, settings.policy.enable_thinking)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        admission = Admission(
            settings=settings.gateway,
            policy=settings.policy,
            renderer=renderer,
            engines=Engines(settings.policy.id, [_engine(session, url) for url in _engine_urls(settings)]),
            recorder=Recorder(log, ack_timeout_s=settings.gateway.ack_timeout_s),
            sessions=SessionIndex(settings.gateway.index_window_s * 1000),
            metrics=Metrics(),
        )
        with _listener(settings.gateway.host, settings.gateway.port) as listener:
            from_ms = epoch_ms() - settings.gateway.index_window_s * 1000
            await learn_sessions(log, admission.sessions, from_ms=from_ms)
            async with asyncio.TaskGroup() as group:
                watching = (
                    group.create_task(follow_policy(log, admission.engines)),
                    group.create_task(admission.engines.watch()),
                )
                try:
                    await _listen(build_app(admission), listener, stop, started)
                finally:
                    for task in watching:
                        task.cancel()


async def _listen(
    app: ASGIApp, listener: socket.socket, stop: asyncio.Event, started: Callable[[str], Awaitable[None]] | None
) -> None:
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(DRAIN_S),
    )
    server = _Server(config)
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
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PartUnavailable(
            f"gateway.port {port} on {host} can't be listened on ({error.strerror}); nothing is served. "
            "Stop what uses it, or set gateway.port"
        ) from error
    listener.listen(512)
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """uvicorn in a process that has signal handlers of its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the handlers as they are."""
        yield


def _engine(session: aiohttp.ClientSession, url: str) -> ServedEngine:
    return ServedEngine(url=url.rstrip("/"), client=SglangEngine(session, url))


def _engine_urls(settings: Settings) -> tuple[str, ...]:
    return settings.engine.urls or (f"http://127.0.0.1:{settings.engine.port}",)


def _model_path(settings: Settings) -> Path:
    if settings.engine.model_path is None:
        raise ConfigError("engine.model_path is not set: name the Hugging Face folder of the policy")
    return settings.engine.model_path
