"""One engine as the gateway knows it, and where a request to it is put: its weights, its adapters, its cache key.

The one rule: no request is answered from a prefix cache that other weights filled, or another tenant: how much of a
prompt was cached is shown, and tells what was asked before. A cache key (`extra_key`) names the
version that the engine is known to serve, so nothing older lies under it: nobody knows a version before it is served,
and an engine that came back with older weights has its cache emptied when it is brought up to date (weights/stage.py).
What is left is a key that the engine has outlived and the gateway has not yet: an answer whose first token was sampled
by other weights than its key names, and which found something cached, is thrown away before anything is shown, and
asked again (`EngineAttempt.check`). tests/unit/gateway/test_cache_keys.py tries all orders of events. Tokens are
labelled by what the engine reports with them; under an adapter, whose weights stay what they are, by the adapter.
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
ANSWERS_WITHIN_S = 20.0  # else an engine is away; more than its longest swap of weights takes


class StaleCache(ClawstreamError):
    """The answer may rest on a cache that older weights filled; nothing of it was shown. Ask again at a new place."""


@dataclass(slots=True, kw_only=True, eq=False)
class ServedEngine:
    """One engine; `problem` is None while it answers."""

    url: str
    client: Engine
    policy_id: str = "policy"
    answers_within_s: float = ANSWERS_WITHIN_S
    context_length_tokens: int | None = None
    largest_token_id: int = -1  # that it may be given
    weights: int | None = None  # None: it has not said yet, and the log has not either
    adapters: dict[int, str] = field(default_factory=dict)  # loaded, by version
    problem: str | None = "not asked yet"
    in_flight: int = 0
    newest_had: int = BASE_VERSION
    doubted: asyncio.Event = field(default_factory=asyncio.Event)
    patience: set[asyncio.Timeout] = field(default_factory=set)  # of the requests in flight

    @property
    def version(self) -> int | None:
        """The newest version that requests to it are answered by; None: not known."""
        return max(self.weights, *self.adapters) if self.adapters and self.weights is not None else self.weights

    def serves(self, weights: int) -> None:
        """These are its weights now."""
        self.weights = weights
        self.newest_had = max(self.newest_had, self.version or BASE_VERSION)

    def loaded(self, version: int, adapter: str) -> None:
        """Requests may name this adapter too."""
        self.adapters = {**self.adapters, version: adapter}
        self.newest_had = max(self.newest_had, version)

    def place(self, *, tenant: str | None = None, alone: bool = False) -> "EngineAttempt":
        """Return where a request is put now, under a cache key that its tenant has; `alone`: that no other has."""
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
        """Believe what it said when asked, unless other news came since the question, when `before` was known."""
        # An event may be missed, and an engine that was away may have older weights.
        if self.weights in (None, before):
            self.serves(weights)

    def give_up(self) -> None:
        """Requests that wait for their first token fail now, those that stream if nothing comes for a while."""
        now = asyncio.get_running_loop().time()
        for patience in self.patience:
            if not patience.expired():
                patience.reschedule(now if patience.when() is not None else now + self.answers_within_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAttempt:
    """One attempt at one engine."""

    engine: ServedEngine
    weights: int  # that the cache key names
    version: int  # of the weights, or of the adapter that is asked for
    adapter: str | None
    alone: bool  # no other request has its cache key
    extra_key: str

    @property
    def adapter_version(self) -> int | None:
        """The version that samples whatever weights lie below it; None: the weights do."""
        return None if self.adapter is None else self.version

    def check(self, first: Chunk) -> None:
        """Learn from the chunk with the first tokens which weights sampled them.

        Raises StaleCache where they are not those of the cache key, and something cached was used. It relies on two
        facts (SGLang 0.5.23, and ours): nothing is sampled while weights change, and their new name is in force before
        sampling goes on; so what new weights sampled is never sent under an older name.
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
