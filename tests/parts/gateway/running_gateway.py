"""A gateway as its clients meet it: real HTTP, over a scripted engine's real HTTP and a log in memory."""

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol, TypeVar

import aiohttp

from clawstream.config import EngineSettings, GatewaySettings, PolicySettings, SamplesSettings, Settings
from clawstream.events import Event, ExchangeCompleted
from clawstream.gateway.app import BOUNDS, GatewayLog, serve
from clawstream.gateway.http.connection import Bounds
from clawstream.gateway.outbox.spool_file import Fsync
from clawstream.rendering.renderer import PromptRenderer
from clawstream.stream.stage import Record
from clawstream.stream.topics import EXCHANGES
from tests.fakes.memory_log import MemoryLog
from tests.fakes.scripted_engine import ScriptedAnswer, ScriptedBackend, serving
from tests.renderers import load_renderer

E = TypeVar("E", bound=Event)
Json = dict[str, Any]
QUESTION: list[Json] = [{"role": "user", "content": "What is 2+2?"}]
WITHIN_S = 10.0


class AnyLog(GatewayLog, Protocol):
    """A log that a test writes to as well."""

    async def append(self, events: Sequence[Event]) -> None:
        """Return when all are on it."""


@dataclass(slots=True, kw_only=True)
class Response:
    """What came back: status, headers, and the body as JSON or as the events of a stream."""

    status: int
    headers: dict[str, str]
    body: Json = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)
    done: bool = False

    @property
    def text(self) -> str:
        """All content of the stream."""
        deltas = [choice["delta"] for event in self.events for choice in event.get("choices", [])]
        return "".join(delta.get("content") or "" for delta in deltas)

    @property
    def finish_reasons(self) -> list[str]:
        """Every finish reason in the stream."""
        found = [choice["finish_reason"] for event in self.events for choice in event.get("choices", [])]
        return [reason for reason in found if reason is not None]


@dataclass(slots=True, kw_only=True)
class RunningGateway:
    """A running gateway and what is behind it."""

    url: str
    client: aiohttp.ClientSession
    engine: ScriptedBackend
    engine_url: str
    log: AnyLog
    renderer: PromptRenderer
    settings: Settings

    async def chat(self, messages: object = None, *, headers: dict[str, str] | None = None, **more: Any) -> Response:
        """Ask; `more` is the rest of the body."""
        body = {"model": "policy", "messages": QUESTION if messages is None else messages} | more
        return await self.post(json.dumps(body).encode(), headers=headers)

    async def post(self, raw: bytes, *, headers: dict[str, str] | None = None) -> Response:
        """Send the bytes as they are."""
        async with self.asking(raw, headers=headers) as answer:
            return await read(answer)

    @asynccontextmanager
    async def asking(
        self, raw: bytes, *, headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request whose answer the caller reads itself."""
        async with self.client.post(f"{self.url}/v1/chat/completions", data=raw, headers=headers or {}) as answer:
            yield answer

    async def get(self, path: str, *, headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Status and text of another page."""
        async with self.client.get(f"{self.url}{path}", headers=headers or {}) as answer:
            return answer.status, await answer.text()

    async def recorded(self, kind: type[E], *, at_least: int = 1) -> list[E]:
        """All events of a kind on the log, once there are so many."""
        found: list[E] = []

        async def there() -> bool:
            found[:] = [event for event in await everything(self.log) if isinstance(event, kind)]
            return len(found) >= at_least

        await until(there)
        return found

    async def exchange(self) -> ExchangeCompleted:
        """The only exchange on the log."""
        (exchange,) = await self.recorded(ExchangeCompleted)
        return exchange

    async def ready(self) -> bool:
        """Whether nothing is missing."""
        return (await self.get("/healthz/ready"))[0] == 200

    async def generating(self) -> bool:
        """Whether the engine has a request."""
        return bool(self.engine.running)

    def say(self, text: str) -> None:
        """From now on the engine answers this, and ends its message."""
        ids = (*self.renderer.encode(text), self.renderer.stop_token_ids[0])
        self.engine.script = lambda _prompt: ScriptedAnswer(token_ids=ids)


@asynccontextmanager
async def running_gateway(
    folder: Path,
    *,
    log: AnyLog | None = None,
    say: str = "It is 4.",
    engine_urls: Sequence[str] = (),
    data_dir: Path | None = None,
    fsync: Fsync = os.fsync,
    bounds: Bounds = BOUNDS,
    samples: SamplesSettings | None = None,
    adapters: str = "shared",
    dialect: Literal["sglang", "vllm"] = "sglang",
    context_length_tokens: int = 2048,
    **gateway: Any,
) -> AsyncIterator[RunningGateway]:
    """A gateway with these settings, answering `say`; `engine_urls` in place of the scripted engine.

    Without `data_dir` it has a folder of its own, which is gone afterwards.
    """
    renderer = load_renderer(folder, "qwen3")
    backend = ScriptedBackend(
        script=lambda _prompt: ScriptedAnswer(token_ids=()),
        decode=renderer.decode,
        eos_token_ids=frozenset(renderer.stop_token_ids),
        context_length_tokens=context_length_tokens,
    )
    log = MemoryLog() if log is None else log
    async with AsyncExitStack() as stack:
        own = Path(stack.enter_context(TemporaryDirectory()))
        engine_url = await stack.enter_async_context(serving(backend))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        settings = Settings(
            data_dir=data_dir or own,
            engine=EngineSettings(urls=tuple(engine_urls) or (engine_url,), dialect=dialect, model_path=folder),
            policy=PolicySettings(renderer="qwen3", adapters=adapters),
            gateway=GatewaySettings(port=0, **gateway),
            samples=samples or SamplesSettings(),
        )
        async with running(settings, log, fsync, bounds) as url:
            found = RunningGateway(
                url=url,
                client=client,
                engine=backend,
                engine_url=engine_url,
                log=log,
                renderer=renderer,
                settings=settings,
            )
            found.say(say)
            if not engine_urls:
                await until(found.ready)
            yield found


@asynccontextmanager
async def running(
    settings: Settings, log: GatewayLog, fsync: Fsync = os.fsync, bounds: Bounds = BOUNDS
) -> AsyncIterator[str]:
    """A gateway for the length of the block; yields its address."""
    stop = asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def started(url: str) -> None:
        address.set_result(url)

    async with asyncio.TaskGroup() as group:
        serving_task = group.create_task(serve(settings, log, stop=stop, started=started, fsync=fsync, bounds=bounds))
        await asyncio.wait((serving_task, address), return_when=asyncio.FIRST_COMPLETED)
        try:
            if address.done():
                yield address.result()
        finally:
            stop.set()


def full_disk(_fd: int) -> None:
    """In place of fsync: nothing fits on the disk any more."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Return once the condition holds."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.005)


async def read(answer: aiohttp.ClientResponse) -> Response:
    """The whole answer."""
    response = Response(status=answer.status, headers={name.lower(): value for name, value in answer.headers.items()})
    raw = await answer.read()
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        response.body = json.loads(raw)
        return response
    for event in raw.decode().split("\n\n"):
        if event == "data: [DONE]":
            response.done = True
        elif event.startswith("data: "):
            response.events.append(json.loads(event.removeprefix("data: ")))
    return response


async def everything(log: GatewayLog) -> list[Event]:
    """All exchanges and session ends on the log."""
    batches = log.follow((EXCHANGES,), until_end=True)
    return [record.event async for records in batches for record in records if isinstance(record, Record)]
