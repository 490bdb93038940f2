"""Engines and a policy topic that can be made to fail, and the stage that keeps the engines current."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp

from clawstream.errors import TryLater
from clawstream.events import Event, PolicyActivated, PolicyPublished
from clawstream.inference.engine import ServerInfo
from clawstream.inference.service import CommandResult
from clawstream.inference.sglang import SglangEngine
from clawstream.stream.log import Arrived, Start
from clawstream.stream.stage import Record
from clawstream.stream.topics import POLICY
from clawstream.weights.fetching import Fetcher
from clawstream.weights.stage import keep_current
from clawstream.weights.taking import SwappingEngine
from tests.fakes.scripted_engine import ScriptedBackend, counting, serving

WITHIN_S = 10.0
Weights = Callable[[int], PolicyPublished]


class PolicyTopic:
    """The policy topic in memory: what was appended, to whoever follows."""

    def __init__(self, *events: Event) -> None:
        self.events = list(events)
        self.refusals = 0
        self._more = asyncio.Condition()

    async def append(self, events: Sequence[Event]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise TryLater("Kafka did not acknowledge")
        async with self._more:
            self.events.extend(events)
            self._more.notify_all()

    async def follow(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncIterator[Sequence[Arrived]]:
        assert list(topics) == [POLICY]
        assert isinstance(start, dict)
        offset = start.get((POLICY, 0), 0)
        while True:
            # One at a time, as slowly as a log may give them.
            for event in self.events[offset:]:
                await asyncio.sleep(0)
                yield [_record(event, offset)]
                offset += 1
            if until_end:
                return
            async with self._more:
                while len(self.events) <= offset:
                    await self._more.wait()

    def said(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S), self._more:
            await self._more.wait_for(holds)

    def active(self) -> list[tuple[str, int]]:
        return [(e.engine, e.policy_version) for e in self.events if isinstance(e, PolicyActivated)]


def _record(event: Event, offset: int) -> Record:
    return Record(topic=POLICY, partition=0, offset=offset, timestamp_ms=0, key="policy", event=event)


class Engine(ScriptedBackend):
    """A scripted engine that keeps a list of what it was told."""

    told: list[str]

    async def pause(self, mode: str) -> None:
        self.told.append(f"pause {mode}")
        await super().pause(mode)

    async def resume(self) -> None:
        self.told.append("resume")
        await super().resume()

    async def update_weights(self, path: str, version: str | None, *, abort_all: bool) -> CommandResult:
        self.told.append(f"update {version}")
        return await super().update_weights(path, version, abort_all=abort_all)


def engine(**how: object) -> Engine:
    made = Engine(script=counting(), **how)  # type: ignore[arg-type]
    made.told = []
    return made


@asynccontextmanager
async def keeping(
    log: PolicyTopic,
    *backends: ScriptedBackend,
    clients: Sequence[SwappingEngine] = (),
    turn_s: float = 60.0,
    drain_s: float = 60.0,
    now_ms: Callable[[], int] = lambda: 7,
    fetcher: Fetcher | None = None,
    by_key: bool = False,
) -> AsyncIterator[list[SwappingEngine]]:
    """Keep scripted engines current for the length of the block; yield what talks to them."""
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        urls = [await stack.enter_async_context(serving(backend)) for backend in backends]
        engines: list[SwappingEngine] = [*clients, *(SglangEngine(http, url) for url in urls)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                keep_current(
                    engines,
                    log,
                    policy_id="policy",
                    by_key=by_key,
                    stop=stop,
                    fetcher=fetcher,
                    ask_every_s=0.02,
                    turn_s=turn_s,
                    drain_s=drain_s,
                    now_ms=now_ms,
                )
            )
            try:
                yield engines
            finally:
                stop.set()


class Watched:
    """An engine that does as it is told unless the test says otherwise."""

    def __init__(
        self, url: str, serves: str, asked: asyncio.Event, fails: dict[str, list[Exception | None]] | None = None
    ) -> None:
        self.url = url
        self.serves = serves
        self.asked = asked
        self.away = False
        self.deaf_to_updates = False
        self.quantized: str | None = None
        self.model_path = "nowhere"
        self.told: list[str] = []
        self.adapters: list[str] = []
        self.fails: dict[str, list[Exception | None]] = fails or {}

    async def weight_version(self) -> str | None:
        self._answer("version")
        self.asked.set()
        return self.serves

    async def server_info(self) -> ServerInfo:
        self._answer("info")
        return ServerInfo(model_path=self.model_path, context_length_tokens=1, weight_version=self.serves)

    async def quantization(self) -> str | None:
        return self.quantized

    async def name_weights(self, version: str) -> None:
        self._answer("name", said=f"name {version}")
        self.serves = version

    async def pause(self, *, retract: bool = False) -> None:
        self._answer("pause", said="retract" if retract else "pause")

    async def update_weights(self, path: str, version: str, *, flush_cache: bool = False) -> None:
        assert path
        self._answer("update", said=f"update {version}{' flush' if flush_cache else ''}")
        if not self.deaf_to_updates:
            self.serves = version

    async def resume(self) -> None:
        self._answer("resume", said="resume")

    async def lora_adapters(self) -> tuple[str, ...]:
        return tuple(self.adapters)

    async def load_lora_adapter(self, name: str, path: str) -> None:
        assert path
        self._answer("load", said=f"load {name}")
        self.adapters.append(name)

    async def unload_lora_adapter(self, name: str) -> None:
        self._answer("unload", said=f"unload {name}")
        self.adapters.remove(name)

    def _answer(self, command: str, said: str | None = None) -> None:
        if self.away:
            raise TryLater("connection refused")
        if said is not None:
            self.told.append(said)
        planned = self.fails.get(command)
        error = planned.pop(0) if planned else None
        if error is not None:
            raise error


class Hangs(Watched):
    """Says nothing from the middle of an update until it is `back`."""

    def __init__(self, url: str, back: asyncio.Event) -> None:
        super().__init__(url, "0", asyncio.Event())
        self.back = back
        self.silent = False

    async def update_weights(self, path: str, version: str, *, flush_cache: bool = False) -> None:
        self.silent = True
        await self.back.wait()
        self.silent = False
        await super().update_weights(path, version, flush_cache=flush_cache)

    async def weight_version(self) -> str | None:
        if self.silent:
            await self.back.wait()
        return await super().weight_version()
