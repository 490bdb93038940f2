"""Keep every engine on the newest published version: pause in place, update, continue.

One task an engine, so that a slow or dead one holds no other up. What an engine serves is asked of the engine itself,
so one that comes back with old weights is brought up to date like any other. A process that was killed in the middle
of a swap may have left an engine paused, so each is told to go on first.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from clawstream.errors import TryLater
from clawstream.events import Event, PolicyActivated, PolicyPublished, PolicyRejected
from clawstream.inference.engine import EngineRefused
from clawstream.stream.log import Arrived, Start
from clawstream.stream.stage import Record
from clawstream.weights.rollout import Rollout, due, learn

log = logging.getLogger(__name__)

POLICY_TOPIC = "clawstream.policy.v1"
ASK_EVERY_S = 2.0  # how soon an engine that came back with old weights is noticed


class SwappingEngine(Protocol):
    """The part of an engine's dialect that a weight change needs."""

    @property
    def url(self) -> str: ...
    async def weight_version(self) -> str | None: ...
    async def pause(self) -> None: ...
    async def update_weights(self, path: str, version: str) -> None: ...
    async def resume(self) -> None: ...


class PolicyLog(Protocol):
    """The part of a log that the policy topic needs."""

    async def append(self, events: Sequence[Event]) -> None: ...
    def follow(
        self, topics: Sequence[str], start: Start, *, until_end: bool = False
    ) -> AsyncIterator[Sequence[Arrived]]: ...


async def keep_current(
    engines: Sequence[SwappingEngine],
    policy_log: PolicyLog,
    *,
    policy_id: str,
    stop: asyncio.Event,
    ask_every_s: float = ASK_EVERY_S,
    now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
) -> None:
    """Run until `stop`: every engine serves the newest version that was published, as soon as it can."""
    board = _Board(Rollout(policy_id=policy_id))
    # Half a log would name an old version as the newest, and engines would go back to it.
    await board.read(policy_log, until_end=True)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(board.read(policy_log))]
        keepers = [_Keeper(engine, board, policy_log, now_ms) for engine in engines]
        running += [tasks.create_task(keeper.keep(ask_every_s)) for keeper in keepers]
        await stop.wait()
        for task in running:
            task.cancel()


class _Board:
    """The newest rollout, and a way to wait for the next."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self._next_offsets: dict[tuple[str, int], int] = {}
        self._changed = asyncio.Condition()

    async def read(self, policy_log: PolicyLog, *, until_end: bool = False) -> None:
        """Go on where the last reading ended."""
        starts = dict(self._next_offsets)
        async for records in policy_log.follow([POLICY_TOPIC], starts, until_end=until_end):
            async with self._changed:
                for record in records:
                    self._next_offsets[record.topic, record.partition] = record.offset + 1
                    if isinstance(record, Record):
                        self.learn(record.event)
                self._changed.notify_all()

    async def changed_since(self, seen: Rollout, timeout_s: float) -> None:
        """Return when the rollout is not the one that was `seen`, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.rollout is not seen)

    def learn(self, event: Event) -> None:
        """Take an event in; one that was taken in before changes nothing."""
        self.rollout = learn(self.rollout, event)


class _Keeper:
    """Keeps one engine current."""

    def __init__(self, engine: SwappingEngine, board: _Board, policy_log: PolicyLog, now_ms: Callable[[], int]) -> None:
        self._engine = engine
        self._board = board
        self._log = policy_log
        self._now_ms = now_ms
        self._was_left_paused = True  # for all we know
        self._waiting = False

    async def keep(self, ask_every_s: float) -> None:
        """Look whenever the log says something new, and every `ask_every_s`; never returns."""
        while True:
            seen = self._board.rollout
            try:
                await self._look(seen)
                self._waiting = False
            except (TryLater, EngineRefused) as error:
                if not self._waiting:
                    log.warning("weights_wait engine=%s why=%s", self._engine.url, error)
                self._waiting = True
            await self._board.changed_since(seen, ask_every_s)

    async def _look(self, rollout: Rollout) -> None:
        """Bring the engine up to date, if it is not; what came of it is on the log when this returns."""
        engine = self._engine
        if self._was_left_paused:
            await engine.resume()
            self._was_left_paused = False
        version = due(rollout, engine=engine.url, serving=await engine.weight_version())
        if version is None:
            return
        outcome = await swap(engine, version, self._now_ms)
        await self._log.append([outcome])
        # Not left to the reading of the log, which the next look may come before.
        self._board.learn(outcome)


async def swap(
    engine: SwappingEngine, version: PolicyPublished, now_ms: Callable[[], int]
) -> PolicyActivated | PolicyRejected:
    """Let `engine` take `version` over while its requests go on; return what came of it.

    The pause is from the call to pause until the engine samples again, so it is an upper bound of what clients see.
    Raises TryLater when the engine does not answer; it is told to go on in any case.
    """
    started = time.perf_counter()
    refusal: str | None = None
    try:
        await engine.pause()
        await engine.update_weights(version.path, str(version.policy_version))
    except EngineRefused as error:
        refusal = str(error)
    finally:
        await engine.resume()
    pause_ms = (time.perf_counter() - started) * 1000
    serving = await engine.weight_version()
    if refusal is None and serving not in (None, str(version.policy_version)):
        refusal = f"it serves {serving} after it took over {version.policy_version}"
    if refusal is not None:
        return _rejected(engine, version, refusal, now_ms())
    log.info("policy_activated engine=%s version=%d pause_ms=%.1f", engine.url, version.policy_version, pause_ms)
    return PolicyActivated(
        policy_id=version.policy_id,
        policy_version=version.policy_version,
        engine=engine.url,
        adapter=version.adapter,
        pause_ms=pause_ms,
        num_bytes=version.num_bytes,
        activated_at_ms=now_ms(),
    )


def _rejected(engine: SwappingEngine, version: PolicyPublished, reason: str, at_ms: int) -> PolicyRejected:
    log.error("policy_rejected engine=%s version=%d why=%s", engine.url, version.policy_version, reason)
    return PolicyRejected(
        policy_id=version.policy_id,
        policy_version=version.policy_version,
        engine=engine.url,
        reason=reason,
        rejected_at_ms=at_ms,
    )
