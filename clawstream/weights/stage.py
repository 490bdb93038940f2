"""Keep every engine on the newest published version, one engine after the other, so that one always serves.

Each engine is asked what it serves, so an engine that comes back with old weights is updated like any other. An engine
that gives no answer for TURN_S during its turn loses the turn. Each engine is first told to resume, since a process
that was killed during a swap may have left it paused.

An engine's cache may hold prompts that older weights filled, under a gateway's keys that name newer weights. So a
takeover of full weights empties the cache unless it is certain what filled it. It is not at our first look at the
engine, at the first after an error, and where the engine serves something else than the log says.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clawstream.errors import TryLater
from clawstream.events import Event, PolicyEvent, PolicyPublished, is_ours
from clawstream.inference.engine import EngineRefused
from clawstream.stream import topics
from clawstream.stream.log import EventLog
from clawstream.stream.stage import Record, now_ms
from clawstream.weights.fetching import Fetcher
from clawstream.weights.rollout import Rollout, Rollouts, Serving, due, forgettable, learn, learn_of_all, waiting
from clawstream.weights.taking import SwappingEngine, forget, serving, take_over

log = logging.getLogger(__name__)

ASK_EVERY_S = 2.0  # how soon an engine that came back with old weights is noticed
TURN_S = 60.0  # an engine that gives no answer for so long during its takeover no longer delays the next engine
DRAIN_S = 60.0  # for so long requests may still begin under an adapter that a newer one has replaced
LONGEST_WAIT_S = 60.0  # between two tries to fetch a version


async def keep_current(
    engines: Sequence[SwappingEngine],
    policy_log: EventLog,
    *,
    policy_id: str,
    by_key: bool = False,
    stop: asyncio.Event,
    model_path: Path | None = None,
    fetcher: Fetcher | None = None,
    ask_every_s: float = ASK_EVERY_S,
    turn_s: float = TURN_S,
    drain_s: float = DRAIN_S,
    now_ms: Callable[[], int] = now_ms,
) -> None:
    """Run until `stop`: every engine takes over the newest published version as soon as its turn comes.

    `by_key`: and the newest adapter of each key's policy. Where the engine's own model can't be read, a version is
    compared with the model in `model_path`, the policy's folder. `fetcher` fetches versions from another machine; None:
    versions are read where they were published.
    """
    board = _Board(policy_id, fetcher, by_key=by_key)
    # A log read only in part would name an old version as the newest, and engines would go back to it.
    await board.read(policy_log, until_end=True)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(board.read(policy_log))]
        if fetcher is not None:
            running.append(tasks.create_task(board.bring(fetcher, ask_every_s)))
        turns = _Turns(turn_s)
        keepers = [_Keeper(engine, board, policy_log, turns, model_path, drain_s, now_ms) for engine in engines]
        running += [tasks.create_task(keeper.keep(ask_every_s)) for keeper in keepers]
        running += [tasks.create_task(keeper.tidy(ask_every_s)) for keeper in keepers]
        await stop.wait()
        for task in running:
            task.cancel()


class _Board:
    """The newest rollouts, and a way to wait for the next; with a `fetcher`, only fetched versions are in them."""

    def __init__(self, policy_id: str, fetcher: Fetcher | None, *, by_key: bool) -> None:
        self.rollouts: Rollouts = {policy_id: Rollout(policy_id=policy_id)}
        self.loading: dict[str, PolicyPublished] = {}  # by engine: the version whose files the engine reads now
        self._policy_id = policy_id
        self._by_key = by_key
        self._published = self.rollout
        self._fetcher = fetcher
        self._next_offsets: dict[tuple[str, int], int] = {}
        self._changed = asyncio.Condition()

    @property
    def rollout(self) -> Rollout:
        """That of the policy that all keys share."""
        return self.rollouts[self._policy_id]

    async def read(self, policy_log: EventLog, *, until_end: bool = False) -> None:
        """Read the policy topic on from where the last reading ended."""
        starts = dict(self._next_offsets)
        async for records in policy_log.follow([topics.POLICY], starts, until_end=until_end):
            async with self._changed:
                for record in records:
                    self._next_offsets[record.topic, record.partition] = record.offset + 1
                    if isinstance(record, Record):
                        self.learn(record.event)
                self._changed.notify_all()

    async def changed_since(self, seen: Rollouts, timeout_s: float) -> None:
        """Return once the rollouts differ from `seen`, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.rollouts is not seen)

    def learn(self, event: Event) -> None:
        """Take an event in; taking the same event in again changes nothing."""
        if not isinstance(event, PolicyEvent) or not is_ours(event.policy_id, self._policy_id, by_key=self._by_key):
            return
        if self._fetcher is not None and isinstance(event, PolicyPublished):
            self._published = learn(self._published, event)
            here = self._fetcher.here(event)
            if here is None:
                return
            event = here
        self.rollouts = learn_of_all(self.rollouts, event)

    async def bring(self, fetcher: Fetcher, every_s: float) -> None:
        """Fetch the newest version as soon as that is possible; never returns.

        Meanwhile engines serve the versions that are here. A fetched version is taken over even if a newer one was
        published since: if versions are published faster than they can be fetched, engines are late but still advance.
        """
        wait_s, why = every_s, None
        while True:
            failed = None
            wanted = self._published.offered
            for version in wanted:
                if fetcher.here(version) is None:
                    failed = await self._bring_one(fetcher, version) or failed
            if failed is None and wanted == self._published.offered:
                wait_s, why = every_s, None
                async with self._changed:
                    await self._changed.wait()
            elif failed is not None:
                if failed != why:
                    log.warning("version_waits why=%s", failed)
                why = failed
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _bring_one(self, fetcher: Fetcher, version: PolicyPublished) -> str | None:
        """Fetch the version; return why that failed, None where it is here."""
        try:
            await asyncio.to_thread(fetcher.make_room, [version, *self.rollout.offered, *self.loading.values()])
            await fetcher.bring(version)
        except TryLater as error:
            return str(error)
        async with self._changed:
            self.learn(version)
            self._changed.notify_all()
        return None


class _Turns:
    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s
        self._taken = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def one(self, engine: SwappingEngine) -> AsyncIterator[None]:
        """Hold the engine's turn for the length of the block; if the engine falls silent, the next turn begins."""
        await self._taken.acquire()
        # The turn ends with this task: when the engine has fallen silent, or when the block's end cancels it.
        silence = asyncio.create_task(self._silent(engine))
        silence.add_done_callback(lambda _: self._taken.release())
        try:
            yield
        finally:
            silence.cancel()

    async def _silent(self, engine: SwappingEngine) -> None:
        """Return once the engine has answered nothing for `turn_s`; one that loads a large model still answers."""
        now_s = asyncio.get_running_loop().time
        answered_at_s = now_s()
        while now_s() - answered_at_s < self._turn_s:
            with contextlib.suppress(TryLater, EngineRefused, TimeoutError):
                async with asyncio.timeout_at(answered_at_s + self._turn_s):
                    await engine.weight_version()
                answered_at_s = now_s()
            await asyncio.sleep(self._turn_s / 10)


@dataclass(slots=True, eq=False)
class _Keeper:
    engine: SwappingEngine
    board: _Board
    policy_log: EventLog
    turns: _Turns
    model_path: Path | None
    drain_s: float
    now_ms: Callable[[], int]
    certain: bool = False  # it is known that the engine is not paused, and which weights filled its cache
    old_since_ms: dict[str, int] = field(default_factory=dict)  # when an adapter was first seen to be old, by name
    waiting: bool = False
    order: list[str] = field(default_factory=list)  # the policies of which a version is due, the next one first
    unloading: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while adapters go, or full weights change

    async def keep(self, ask_every_s: float) -> None:
        """Bring the engine up to date at each change on the log, and every `ask_every_s`; never returns."""
        while True:
            seen = self.board.rollouts
            try:
                await self._look()
                self.certain, self.waiting = True, False
            except (TryLater, EngineRefused) as error:
                if not self.waiting:
                    log.warning("weights_wait engine=%s why=%s", self.engine.url, error)
                self.certain, self.waiting = False, True
            await self.board.changed_since(seen, ask_every_s)

    async def _look(self) -> None:
        """Bring the engine up to date; the outcome is on the log when this returns."""
        if not self.certain:
            await self.engine.resume()
        while self._next(await serving(self.engine)) is not None:
            async with self.turns.one(self.engine):
                await self._take_over()

    def _next(self, now: Serving) -> PolicyPublished | None:
        """Return the version that is to be taken over next; None: the engine is up to date."""
        states, engine = self.board.rollouts, self.engine.url
        self.order = waiting(states, engine=engine, serving=now, before=self.order)
        return due(states[self.order[0]], engine=engine, serving=now) if self.order else None

    async def tidy(self, every_s: float) -> None:
        """Unload adapters that no new request names any more, while takeovers go on; never returns."""
        while True:
            with contextlib.suppress(TryLater, EngineRefused):
                await self._forget_old()
            await self.board.changed_since(self.board.rollouts, every_s)

    async def _note_old(self) -> None:
        loaded, now_ms = await self.engine.lora_adapters(), self.now_ms()
        states = self.board.rollouts.values()
        old = [name for state in states for name in forgettable(state, engine=self.engine.url, loaded=loaded)]
        self.old_since_ms = {name: self.old_since_ms.get(name, now_ms) for name in old}

    async def _forget_old(self) -> None:
        await self._note_old()
        now_ms = self.now_ms()
        drained = [name for name, since_ms in self.old_since_ms.items() if now_ms - since_ms >= 1000 * self.drain_s]
        if drained:
            async with self.unloading:
                await forget(self.engine, drained)

    async def _take_over(self) -> None:
        """Take over the version that is due now: it may be newer than the one that was due before the turn began."""
        engine, rollout = self.engine, self.board.rollout
        now = await serving(engine)
        version = self._next(now)
        if version is None:
            return
        self.order.remove(version.policy_id)  # so that an adapter which can't be loaded holds no other key's up
        afresh = not self.certain or now.version != str(rollout.active.get(engine.url))
        async with self.unloading if version.adapter is None else contextlib.nullcontext():
            self.board.loading[engine.url] = version
            try:
                outcome = await take_over(engine, version, self.now_ms, afresh=afresh, model_path=self.model_path)
            finally:
                del self.board.loading[engine.url]
        await self.policy_log.append([outcome])
        # The outcome is learned at once, since the next look may come before the log is read.
        self.board.learn(outcome)
        self.certain = True
        if version.adapter is not None:
            await self._note_old()
