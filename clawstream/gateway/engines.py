"""The engines behind the gateway: which one answers a session, whether it is there, and which weights it serves.

The one rule: a version is known from the policy topic as soon as it says so and from the engine itself every few
seconds, and only names the cache that a request may share (`extra_key`); what sampled a token is what the engine
reports with it.
"""

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from clawstream.errors import TryLater
from clawstream.events import PolicyActivated
from clawstream.gateway.capture import BASE_VERSION, policy_version
from clawstream.inference.engine import Engine, EngineRefused

LOG = logging.getLogger(__name__)
ASK_EVERY_S = 2.0
ANSWERS_WITHIN_S = 10.0


@dataclass(slots=True, kw_only=True)
class ServedEngine:
    """One engine; `problem` is None while it answers."""

    url: str
    client: Engine
    context_length_tokens: int | None = None
    version: int | None = None  # None: it has not said yet, and the log has not either
    problem: str | None = "not asked yet"

    def known_version(self) -> int:
        """Return the newest version that this engine is known to serve."""
        return BASE_VERSION if self.version is None else self.version

    async def ask(self) -> None:
        """Find out whether the engine is there, and what it serves, unless an event told that meanwhile."""
        before = self.version
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                info = await self.client.server_info()
            version = policy_version(info.weight_version)
        except (TryLater, EngineRefused, TimeoutError) as error:
            reason = str(error) or f"engine {self.url}: no answer within {ANSWERS_WITHIN_S:g} s"
            if self.problem is None:
                LOG.warning("engine=%s state=away reason=%s", self.url, reason)
            self.problem = reason
            return
        if self.problem is not None:
            LOG.info("engine=%s state=ready version=%d", self.url, version)
        if self.version == before:
            self.version = version  # an event may be missed, and an engine that was away may have older weights
        self.context_length_tokens, self.problem = info.context_length_tokens, None


class Engines:
    """All engines of one policy; each session keeps to one of them."""

    def __init__(self, policy_id: str, engines: Sequence[ServedEngine]) -> None:
        assert engines
        self._policy_id = policy_id
        self.all = tuple(engines)

    def of_session(self, session_id: str) -> ServedEngine:
        """Return the engine that has the session's prefix cached; another one while that one is away."""
        digest = int.from_bytes(hashlib.blake2b(session_id.encode(), digest_size=4).digest())
        ordered = [self.all[(digest + step) % len(self.all)] for step in range(len(self.all))]
        return next((engine for engine in ordered if engine.problem is None), ordered[0])

    def learn(self, event: PolicyActivated) -> None:
        """An engine serves another version from now on."""
        if event.policy_id != self._policy_id:
            return
        for engine in self.all:
            if len(self.all) == 1 or engine.url == event.engine.rstrip("/"):
                engine.version = event.policy_version

    async def watch(self) -> None:
        """Ask every engine again and again whether it is there; never returns."""
        while True:
            await asyncio.gather(*(engine.ask() for engine in self.all))
            await asyncio.sleep(ASK_EVERY_S)
