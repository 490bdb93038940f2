"""The engines behind the gateway: which of them are offered requests, and which one gets a session's next request.

An engine that is away, hangs or came back with old weights is offered no request while another engine is current. A
session stays with the engine that has its prefix cached, unless that one is not offered or clearly has more load.
Where each key has an adapter, engines with the newest adapter of the request's key go before all others.
No request uses a prefix cache that other weights or another tenant filled (`EngineAttempt`).
"""

import asyncio
import hashlib
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from clawstream.errors import ClawstreamError, TryLater
from clawstream.events import PolicyActivated, is_of_policy
from clawstream.inference.engine import (
    BASE_VERSION,
    Adapters,
    Chunk,
    Engine,
    EngineRefused,
    adapters_of,
    newest_of,
    policy_version,
)
from clawstream.inference.model_folder import too_small_for
from clawstream.stream.runner.calling import wait_at_most

LOG = logging.getLogger(__name__)
ANSWERS_WITHIN_S = 20.0  # after that the engine counts as away; longer than any change of weights
BEHIND_FOR_S = 30.0  # engines are updated in turn; one that is not yet updated is offered for so long
SLACK_REQUESTS = 4  # a session's engine may have so many requests more than the one with the fewest, or twice as many
ASK_EVERY_S = 2.0
_HOMES = 65_536  # sessions whose engine is remembered


class StaleCache(ClawstreamError):
    """The answer may rest on a cache that other weights filled. The client saw nothing of it. Make a new attempt."""


@dataclass(slots=True, kw_only=True, eq=False)
class ServedEngine:
    """One engine; `problem` is None while it answers."""

    url: str
    client: Engine
    policy_id: str = "policy"  # of the policy that all share
    answers_within_s: float = ANSWERS_WITHIN_S
    context_length_tokens: int | None = None
    largest_token_id: int = -1  # the largest token id that requests may contain
    weights: int | None = None  # the version; None: neither the engine nor the log has said yet
    adapters: Adapters = field(default_factory=dict)  # the loaded ones, those of keys' policies too
    problem: str | None = "not asked yet"
    in_flight: int = 0
    newest_had: int = BASE_VERSION  # the newest version that it ever served, as far as known
    doubted: asyncio.Event = field(default_factory=asyncio.Event)  # set: a request failed, so ask the engine at once
    timeouts: set[asyncio.Timeout] = field(default_factory=set)  # of requests in flight
    bounded: set[asyncio.Timeout] = field(default_factory=set)  # of streams that `give_up` gave a time limit

    @property
    def version(self) -> int | None:
        """The newest version of the shared policy that the engine can answer with; None: not known."""
        return None if self.weights is None else newest_of(self.policy_id, self.weights, self.adapters).version

    def serves(self, weights: int) -> None:
        """Note the version of the engine's present weights."""
        self.weights = weights
        self.newest_had = max(self.newest_had, self.version or BASE_VERSION)

    def loaded(self, policy_id: str, version: int, adapter: str) -> None:
        """Note that the engine has loaded this adapter of the policy, so that requests may name it."""
        self.adapters = {**self.adapters, policy_id: {**self.adapters.get(policy_id, {}), version: adapter}}
        if policy_id == self.policy_id:
            self.newest_had = max(self.newest_had, version)

    def has(self, adapter: str) -> bool:
        """Return whether the adapter is loaded, as far as known."""
        return any(adapter in versions.values() for versions in self.adapters.values())

    def place(self, *, policy_id: str | None = None, tenant: str | None = None, alone: bool = False) -> "EngineAttempt":
        """Return an attempt at this engine under the tenant's cache key; `alone`: under a key of its own.

        `policy_id` is of the policy to answer; None: of the one that all share.
        """
        weights = BASE_VERSION if self.weights is None else self.weights
        found = newest_of(policy_id or self.policy_id, weights, self.adapters)
        return EngineAttempt(
            engine=self,
            weights=weights,
            version=found.version,
            adapter=found.adapter,
            alone=alone,
            extra_key=found.cache_key(uuid.uuid4().hex if alone else tenant),
        )

    async def ask(self) -> None:
        """Ask the engine whether it answers and what it serves; a version that an event names meanwhile stays."""
        self.doubted.clear()
        before = self.weights
        try:
            async with asyncio.timeout(self.answers_within_s):
                info = await self.client.server_info()
                too_small = await asyncio.to_thread(too_small_for, self.largest_token_id, Path(info.model_path))
                names = await self.client.lora_adapters()
            weights = policy_version(info.weight_version)
        except (TryLater, EngineRefused, TimeoutError) as error:
            reason = str(error) or f"engine {self.url}: no answer within {self.answers_within_s:g} s"
            self._refuse(logging.WARNING, "away", reason)
            return
        if too_small is not None:
            self._refuse(logging.ERROR, "unfit", f"engine {self.url}: {too_small}; start it with the policy's model")
            return
        self.adapters = adapters_of(names)
        self.reported(weights, before)
        if self.problem is not None:
            LOG.info("engine=%s state=ready version=%s", self.url, self.version)
        self.context_length_tokens, self.problem = info.context_length_tokens, None

    def _refuse(self, level: int, state: str, problem: str) -> None:
        if self.problem != problem:
            LOG.log(level, "engine=%s state=%s reason=%s", self.url, state, problem)
        self.problem = problem

    def reported(self, weights: int, before: int | None) -> None:
        """Note the `weights` that the engine reported, unless the noted ones, `before`, changed while it was asked."""
        # Events don't suffice: some may be missed, and an engine that was away may have older weights.
        if self.weights in (None, before):
            self.serves(weights)

    def give_up(self) -> None:
        """Fail each request without a first token now, and a streaming one after `answers_within_s` without a token.

        Further calls leave a stream the time that it has left.
        """
        now = asyncio.get_running_loop().time()
        for timeout in self.timeouts:
            if timeout.when() is None:
                self.bounded.add(timeout)
                timeout.reschedule(now + self.answers_within_s)
            elif timeout not in self.bounded and not timeout.expired():
                timeout.reschedule(now)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAttempt:
    """One attempt to have an engine answer a request, under a cache key (`extra_key`).

    The key names the tenant, and the version of weights that the gateway knows the engine to serve. The cache under it
    holds nothing of older weights: a version becomes known only once the engine serves it, and an engine that came back
    with older weights has its cache emptied when it is updated (weights/stage.py). It may hold something of newer ones,
    as an engine may change its weights before the gateway knows. `check` discards an answer from such a cache.
    """

    engine: ServedEngine
    weights: int  # the version that the cache key names
    version: int  # the version asked for: of the weights or of the adapter
    adapter: str | None
    alone: bool  # no other request has its cache key
    extra_key: str

    @property
    def adapter_version(self) -> int | None:
        """The version of the adapter that samples; None: the weights themselves do."""
        return None if self.adapter is None else self.version

    def check(self, first: Chunk) -> None:
        """Note which weights sampled the first tokens, which are in the chunk `first`.

        Raises StaleCache if cached tokens were used and the cache key names other weights. This relies on two facts
        about SGLang 0.5.23 and our engine: nothing is sampled while weights change, and the new version's name is set
        before sampling goes on. So tokens of new weights never carry an older name.
        """
        told = next((span.version for span in first.weight_versions if span.num_tokens), first.weight_version)
        if told is None:
            return
        served = policy_version(told)
        if served == self.weights:
            return
        known = self.engine.weights
        if known is None or served > known or served < self.weights:
            self.engine.serves(served)
        if first.cached_tokens != 0 and not self.alone:
            raise StaleCache(
                f"engine {self.engine.url}: version {served} answers from {first.cached_tokens} tokens cached under "
                f"{self.extra_key}; asked again under another key"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """The state of an engine when a request is placed."""

    version: int | None  # the one it serves; None: it does not answer
    newest_had: int  # the newest version that it ever served, as far as known
    behind_s: float | None  # how long it has been offered without the newest version; None: it was not offered


def offered(engines: Sequence[EngineState]) -> tuple[bool, ...]:
    """Return which engines are offered: those that answer and are not behind, or else those with the newest version.

    An engine that came back with old weights is behind at once. One that waits for its turn in an update is behind
    after BEHIND_FOR_S.
    """
    newest = max((engine.version for engine in engines if engine.version is not None), default=None)
    current = tuple(_is_current(engine, newest) for engine in engines)
    return current if any(current) else tuple(newest is not None and engine.version == newest for engine in engines)


def _is_current(engine: EngineState, newest: int | None) -> bool:
    if engine.version is None or newest is None or engine.version < engine.newest_had:
        return False
    return engine.version == newest or (engine.behind_s is not None and engine.behind_s <= BEHIND_FOR_S)


def choose(in_flight: Sequence[int | None], *, home: int | None, order: Iterable[int]) -> int | None:
    """Return the number of the engine to ask: `home` unless it has too much load, else the engine with the least.

    `in_flight` is the number of requests at each engine, None where it is not offered. `home` is the engine of the
    session's last request; `order` decides among engines of equal load. None: no engine is offered.
    """
    loads = {number: load for number, load in enumerate(in_flight) if load is not None}
    if not loads:
        return None
    least = min(loads.values())
    if home in loads and loads[home] - least <= max(SLACK_REQUESTS, least):
        return home
    return next(number for number in order if loads.get(number) == least)


def order_of(session_id: str, urls: Sequence[str]) -> Iterator[int]:
    """Yield the engines' numbers in a session's order of preference, by a hash: the same in every gateway."""

    def weight(number: int) -> bytes:
        return hashlib.blake2b(f"{session_id}\n{urls[number]}".encode(), digest_size=8).digest()

    yield from sorted(range(len(urls)), key=weight)


def _with_newest(engines: Sequence[ServedEngine], policy_id: str) -> Sequence[ServedEngine]:
    """Return those with the newest adapter that any of them has of a key's policy; all, if none has one."""
    newest = max((version for engine in engines for version in engine.adapters.get(policy_id, {})), default=None)
    if newest is None:
        return engines
    return [engine for engine in engines if newest in engine.adapters.get(policy_id, {})]


class Engines:
    """All engines of one policy; places each session's requests with one engine where possible."""

    def __init__(
        self, policy_id: str, engines: Sequence[ServedEngine], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert engines
        self._policy_id = policy_id
        self.all = tuple(engines)
        self._clock = clock
        self._urls = tuple(engine.url for engine in self.all)
        self._behind_since: dict[str, float] = {}  # by URL: offered engines without the newest version
        self._in_service: set[str] = set()
        self._homes: OrderedDict[str, int] = OrderedDict()

    def place(
        self,
        session_id: str,
        *,
        policy_id: str | None = None,
        tenant: str | None = None,
        avoid: Collection[ServedEngine] = (),
        alone: bool = False,
    ) -> EngineAttempt | None:
        """Return an attempt for the session's next request; None: no engine is offered, except those to `avoid`.

        `policy_id` is of the policy that is to answer; None: of the one that all share.
        """
        able: Sequence[ServedEngine] = [engine for engine, ok in self.offered().items() if ok and engine not in avoid]
        if policy_id not in (None, self._policy_id):
            able = _with_newest(able, policy_id)
        in_flight = [engine.in_flight if engine in able else None for engine in self.all]
        found = choose(in_flight, home=self._homes.get(session_id), order=order_of(session_id, self._urls))
        return None if found is None else self.all[found].place(policy_id=policy_id, tenant=tenant, alone=alone)

    @contextmanager
    def asked(self, session_id: str, place: EngineAttempt, timeout: asyncio.Timeout) -> Iterator[None]:
        """Count a request of the session as in flight during the block; `timeout` expires once the engine is lost."""
        engine = place.engine
        self._homes[session_id] = self.all.index(engine)
        self._homes.move_to_end(session_id)
        if len(self._homes) > _HOMES:
            self._homes.popitem(last=False)
        engine.in_flight += 1
        engine.timeouts.add(timeout)
        try:
            yield
        finally:
            engine.timeouts.discard(timeout)
            engine.bounded.discard(timeout)
            engine.in_flight -= 1

    def offered(self) -> dict[ServedEngine, bool]:
        """Return for each engine whether it is offered requests."""
        now = self._clock()
        found = dict(zip(self.all, offered([self._state(engine, now) for engine in self.all]), strict=True))
        if len(self.all) > 1:
            self._note(found, now)
        return found

    def problem(self) -> str:
        """Say why no engine is offered."""
        return "; ".join(str(engine.problem) for engine in self.all if engine.problem is not None)

    def learn(self, event: PolicyActivated) -> None:
        """Note the version that an engine now serves; an event about older weights changes nothing."""
        if not is_of_policy(event.policy_id, self._policy_id):
            return
        for engine in self.all:
            if len(self.all) > 1 and engine.url != event.engine.rstrip("/"):
                continue
            if event.adapter is not None:
                engine.loaded(event.policy_id, event.policy_version, event.adapter)
            elif event.policy_id == self._policy_id and (
                engine.weights is None or event.policy_version > engine.weights
            ):
                engine.serves(event.policy_version)

    async def watch(self) -> None:
        """Ask every engine whether it answers, at intervals and whenever it is in doubt; never returns."""
        async with asyncio.TaskGroup() as group:
            for engine in self.all:
                group.create_task(self._watch(engine))

    async def _watch(self, engine: ServedEngine) -> None:
        while True:
            await engine.ask()
            others = [other for other, ok in self.offered().items() if ok and other is not engine]
            if engine.problem is not None and others:
                engine.give_up()
            await wait_at_most(engine.doubted, ASK_EVERY_S)

    def _state(self, engine: ServedEngine, now: float) -> EngineState:
        answers = engine.problem is None and engine.context_length_tokens is not None
        behind_s = now - self._behind_since.get(engine.url, now) if engine.url in self._in_service else None
        return EngineState(
            version=(engine.version or BASE_VERSION) if answers else None,
            newest_had=engine.newest_had,
            behind_s=behind_s,
        )

    def _note(self, found: Mapping[ServedEngine, bool], now: float) -> None:
        """Note which engines are offered, and since when each lacks the newest version."""
        newest = max((engine.version or BASE_VERSION for engine, ok in found.items() if ok), default=None)
        for engine, ok in found.items():
            if ok != (engine.url in self._in_service):
                LOG.info("engine=%s state=%s version=%s", engine.url, "offered" if ok else "out", engine.version)
            (self._in_service.add if ok else self._in_service.discard)(engine.url)
            if ok and newest is not None and (engine.version or BASE_VERSION) < newest:
                self._behind_since.setdefault(engine.url, now)
            else:
                self._behind_since.pop(engine.url, None)
