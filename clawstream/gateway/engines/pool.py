"""The engines behind the gateway: which one answers a session, and which ones get requests at all.

The one rule: an engine that is away, hangs or came back with old weights gets no request while another one will do. The
weights stage brings it up to date, and it gets requests again once it says so. The gateway itself counts each engine's
requests in flight.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from clawstream.events import PolicyActivated
from clawstream.gateway.engines.routing import EngineLoad, choose, offered, order_of
from clawstream.gateway.engines.served import EngineAttempt, ServedEngine
from clawstream.inference.engines.adapters import BASE_VERSION

LOG = logging.getLogger(__name__)
ASK_EVERY_S = 2.0
_HOMES = 65_536  # sessions whose engine is remembered


class Engines:
    """All engines of one policy; each session stays with one of them as long as that is reasonable."""

    def __init__(
        self, policy_id: str, engines: Sequence[ServedEngine], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert engines
        self._policy_id = policy_id
        self.all = tuple(engines)
        self._clock = clock
        self._urls = tuple(engine.url for engine in self.all)
        self._behind_since: dict[str, float] = {}  # engines that are in service and not at the newest version
        self._in_service: set[str] = set()
        self._homes: OrderedDict[str, int] = OrderedDict()

    def place(
        self,
        session_id: str,
        *,
        tenant: str | None = None,
        avoid: Collection[ServedEngine] = (),
        alone: bool = False,
    ) -> EngineAttempt | None:
        """Return the attempt for the session's next request; None while no engine but those to avoid is offered."""
        allowed = self._offered()
        in_flight = [
            engine.in_flight if ok and engine not in avoid else None
            for engine, ok in zip(self.all, allowed, strict=True)
        ]
        if len(self.all) == 1:
            return None if in_flight[0] is None else self.all[0].place(tenant=tenant, alone=alone)
        found = choose(in_flight, home=self._homes.get(session_id), order=order_of(session_id, self._urls))
        return None if found is None else self.all[found].place(tenant=tenant, alone=alone)

    @contextmanager
    def asked(self, session_id: str, place: EngineAttempt, patience: asyncio.Timeout) -> Iterator[None]:
        """Count a request of the session in flight at the place during the block; a lost engine ends `patience`."""
        engine = place.engine
        self._homes[session_id] = self.all.index(engine)
        self._homes.move_to_end(session_id)
        if len(self._homes) > _HOMES:
            self._homes.popitem(last=False)
        engine.in_flight += 1
        engine.patience.add(patience)
        try:
            yield
        finally:
            engine.patience.discard(patience)
            engine.in_flight -= 1

    def offered(self) -> dict[ServedEngine, bool]:
        """Return whether requests are put to each engine."""
        return dict(zip(self.all, self._offered(), strict=True))

    def problem(self) -> str:
        """Say why no engine is offered."""
        return "; ".join(str(engine.problem) for engine in self.all if engine.problem is not None)

    def learn(self, event: PolicyActivated) -> None:
        """Learn that an engine serves another version from now on; news older than what is known change nothing."""
        if event.policy_id != self._policy_id:
            return
        for engine in self.all:
            if len(self.all) > 1 and engine.url != event.engine.rstrip("/"):
                continue
            if event.adapter is not None:
                engine.loaded(event.policy_version, event.adapter)
            elif engine.weights is None or event.policy_version > engine.weights:
                engine.serves(event.policy_version)

    async def watch(self) -> None:
        """Ask every engine at intervals, and whenever it is doubted, whether it is there; never returns."""
        async with asyncio.TaskGroup() as group:
            for engine in self.all:
                group.create_task(self._watch(engine))

    async def _watch(self, engine: ServedEngine) -> None:
        while True:
            await engine.ask()
            others = [other for other, ok in zip(self.all, self._offered(), strict=True) if ok and other is not engine]
            if engine.problem is not None and others:
                engine.give_up()
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_EVERY_S):
                    await engine.doubted.wait()

    def _offered(self) -> tuple[bool, ...]:
        now = self._clock()
        found = offered([self._standing(engine, now) for engine in self.all])
        if len(self.all) > 1:
            self._note(found, now)
        return found

    def _standing(self, engine: ServedEngine, now: float) -> EngineLoad:
        answers = engine.problem is None and engine.context_length_tokens is not None
        behind_s = now - self._behind_since.get(engine.url, now) if engine.url in self._in_service else None
        return EngineLoad(
            version=(engine.version or BASE_VERSION) if answers else None,
            newest_had=engine.newest_had,
            behind_s=behind_s,
        )

    def _note(self, found: tuple[bool, ...], now: float) -> None:
        """Remember which engines are in service, and since when each is behind."""
        newest = max((e.version or BASE_VERSION for e, ok in zip(self.all, found, strict=True) if ok), default=None)
        for engine, ok in zip(self.all, found, strict=True):
            if ok != (engine.url in self._in_service):
                LOG.info("engine=%s state=%s version=%s", engine.url, "offered" if ok else "out", engine.version)
            (self._in_service.add if ok else self._in_service.discard)(engine.url)
            if ok and newest is not None and (engine.version or BASE_VERSION) < newest:
                self._behind_since.setdefault(engine.url, now)
            else:
                self._behind_since.pop(engine.url, None)
