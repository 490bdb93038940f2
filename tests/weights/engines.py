"""Engines and a policy topic that can be made to fail, and the stage that keeps the engines current."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp

from clawstream.errors import TryLater
from clawstream.events import Event, PolicyActivated
from clawstream.inference.scripted import ScriptedBackend, counting, serving
from clawstream.inference.sglang import SglangEngine
from clawstream.stream.log import Arrived, Start
from clawstream.stream.stage import Record
from clawstream.weights.stage import POLICY_TOPIC, keep_current
from clawstream.weights.taking import SwappingEngine

WITHIN_S = 10.0


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
        self, topics: Sequence[str], start: Start, *, until_end: bool = False
    ) -> AsyncIterator[Sequence[Arrived]]:
        assert list(topics) == [POLICY_TOPIC]
        assert isinstance(start, dict)
        offset = start.get((POLICY_TOPIC, 0), 0)
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
    return Record(topic=POLICY_TOPIC, partition=0, offset=offset, timestamp_ms=0, key="policy", event=event)


class Engine(ScriptedBackend):
    """A scripted engine that keeps a list of what it was told."""

    told: list[str]

    async def pause(self, mode: str) -> None:
        self.told.append(f"pause {mode}")
        await super().pause(mode)

    async def resume(self) -> None:
        self.told.append("resume")
        await super().resume()

    async def update_weights(self, path: str, version: str | None, *, abort_all: bool) -> object:  # type: ignore[override]
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
                    stop=stop,
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
