"""One engine as the gateway knows it, and the attempts made at it: its weights, its adapters, its cache keys.

The one rule: no request is answered from a prefix cache that other weights or another tenant filled. (The answer shows
how much of its prompt was cached, which would tell what another tenant asked.)

A cache key (`extra_key`) names the version that the engine is known to serve. Nothing older is cached under it: no
version is known before it is served, and an engine that came back with older weights has its cache emptied when it is
brought up to date (weights/stage.py). The engine may have changed its weights before the gateway knows. So an answer
that used cached tokens, and whose first token was sampled by other weights than its key names, is thrown away before
anything is shown, and asked again (`EngineAttempt.check`). tests/unit/gateway/test_cache_keys.py tries all orders of
events. Tokens are labelled with the version that the engine reports, or with the adapter's version.
"""

import asyncio
import logging
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from clawstream.errors import ClawstreamError, TryLater
from clawstream.inference.engines.adapters import BASE_VERSION, adapter_version, cache_key, policy_version
from clawstream.inference.engines.engine import Chunk, Engine, EngineRefused
from clawstream.inference.models.vocabulary import too_small_for

LOG = logging.getLogger(__name__)
ANSWERS_WITHIN_S = 20.0  # else the engine is away; longer than its longest swap of weights


class StaleCache(ClawstreamError):
    """The answer may use a cache that other weights filled; nothing of it was shown. Ask again with a new attempt."""


@dataclass(slots=True, kw_only=True, eq=False)
class ServedEngine:
    """One engine; `problem` is None while it answers."""

    url: str
    client: Engine
    policy_id: str = "policy"
    answers_within_s: float = ANSWERS_WITHIN_S
    context_length_tokens: int | None = None
    largest_token_id: int = -1  # the largest id that it may be given
    weights: int | None = None  # the version; None: neither the engine nor the log has said yet
    adapters: dict[int, str] = field(default_factory=dict)  # loaded, by version
    problem: str | None = "not asked yet"
    in_flight: int = 0
    newest_had: int = BASE_VERSION
    doubted: asyncio.Event = field(default_factory=asyncio.Event)
    patience: set[asyncio.Timeout] = field(default_factory=set)  # of the requests in flight

    @property
    def version(self) -> int | None:
        """The newest version that answers requests to it; None: not known."""
        return max(self.weights, *self.adapters) if self.adapters and self.weights is not None else self.weights

    def serves(self, weights: int) -> None:
        """Note its weights of now."""
        self.weights = weights
        self.newest_had = max(self.newest_had, self.version or BASE_VERSION)

    def loaded(self, version: int, adapter: str) -> None:
        """Note that requests may name this adapter too."""
        self.adapters = {**self.adapters, version: adapter}
        self.newest_had = max(self.newest_had, version)

    def place(self, *, tenant: str | None = None, alone: bool = False) -> "EngineAttempt":
        """Return an attempt at this engine under the tenant's cache key; `alone`: under a key of its own."""
        weights = BASE_VERSION if self.weights is None else self.weights
        version = BASE_VERSION if self.version is None else self.version
        return EngineAttempt(
            engine=self,
            weights=weights,
            version=version,
            adapter=self.adapters.get(version) if version != weights else None,
            alone=alone,
            extra_key=cache_key(self.policy_id, weights, uuid.uuid4().hex if alone else tenant),
        )

    async def ask(self) -> None:
        """Find out whether the engine is there, and what it serves, unless an event told that meanwhile."""
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
            if self.problem != reason:
                LOG.warning("engine=%s state=away reason=%s", self.url, reason)
            self.problem = reason
            return
        if too_small is not None:
            reason = f"engine {self.url}: {too_small}; start it with the policy's model"
            if self.problem != reason:
                LOG.error("engine=%s state=unfit reason=%s", self.url, reason)
            self.problem = reason
            return
        versions = {adapter_version(self.policy_id, name): name for name in names}
        self.adapters = {version: name for version, name in versions.items() if version is not None}
        self.told(weights, before)
        if self.problem is not None:
            LOG.info("engine=%s state=ready version=%s", self.url, self.version)
        self.context_length_tokens, self.problem = info.context_length_tokens, None

    def told(self, weights: int, before: int | None) -> None:
        """Take over the weights that it named when asked, unless they changed since the question from `before`."""
        # An event may be missed, and an engine that was away may have older weights.
        if self.weights in (None, before):
            self.serves(weights)

    def give_up(self) -> None:
        """Fail requests that wait for their first token now, and streaming ones if nothing comes for a while."""
        now = asyncio.get_running_loop().time()
        for patience in self.patience:
            if not patience.expired():
                patience.reschedule(now if patience.when() is not None else now + self.answers_within_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAttempt:
    """One attempt at one engine."""

    engine: ServedEngine
    weights: int  # the version that the cache key names
    version: int  # of the weights, or of the adapter that is asked for
    adapter: str | None
    alone: bool  # no other request has its cache key
    extra_key: str

    @property
    def adapter_version(self) -> int | None:
        """The version of the adapter that samples; None: the weights themselves do."""
        return None if self.adapter is None else self.version

    def check(self, first: Chunk) -> None:
        """Learn from the chunk with the first tokens which weights sampled them.

        Raises StaleCache where they are not those of the cache key and cached tokens were used. This relies on two
        facts (SGLang 0.5.23, and our engine): nothing is sampled while weights change, and their new name is in force
        before sampling goes on. So tokens of new weights are never sent under an older name.
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
                f"engine {self.engine.url}: {first.cached_tokens} cached tokens under {self.extra_key}, sampled by "
                f"{served}; asked again under another key"
            )
