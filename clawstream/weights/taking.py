"""One engine takes one version over, while its requests go on.

- Full weights in place, the usual case: pause, update, continue. Running requests keep their KV cache; the gateway
  avoids what is cached under older keys. Our adapters are unloaded first, so that requests under them end before the
  weights below them change.
- Full weights afresh, where it is not certain which weights filled the engine's cache (it came back with old ones, or
  we do not know): running requests are retracted, the cache is emptied, and they are computed again.
- Adapters, each under a name of its own: nothing is paused.

Full weights whose tensors don't fit the model that the engine serves are never shown to it (fitting.py says what it
would do). The engine's model is read at the path that the engine names, else in the policy's own folder; where neither
can be seen from here, the engine is left to judge.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from clawstream.errors import TryLater
from clawstream.events import PolicyActivated, PolicyPublished, PolicyRejected
from clawstream.inference.engines.adapters import adapter_version
from clawstream.inference.engines.engine import EngineRefused, ServerInfo
from clawstream.weights.checking import unfit
from clawstream.weights.rollout import Serving, misnamed, serves

log = logging.getLogger(__name__)


class SwappingEngine(Protocol):
    """The part of an engine's dialect that a weight change needs."""

    @property
    def url(self) -> str: ...
    async def weight_version(self) -> str | None: ...
    async def server_info(self) -> ServerInfo: ...
    async def pause(self, *, retract: bool = False) -> None: ...
    async def update_weights(self, path: str, version: str, *, flush_cache: bool = False) -> None: ...
    async def resume(self) -> None: ...
    async def lora_adapters(self) -> tuple[str, ...]: ...
    async def load_lora_adapter(self, name: str, path: str) -> None: ...
    async def unload_lora_adapter(self, name: str) -> None: ...


async def serving(engine: SwappingEngine) -> Serving:
    """Return what the engine says it serves. Raises TryLater when it does not answer."""
    return Serving(version=await engine.weight_version(), adapters=frozenset(await engine.lora_adapters()))


async def take_over(
    engine: SwappingEngine,
    version: PolicyPublished,
    now_ms: Callable[[], int],
    *,
    afresh: bool = False,
    model_path: Path | None = None,
) -> PolicyActivated | PolicyRejected:
    """Let `engine` take `version` over while its requests go on; return the outcome.

    `model_path` is a folder of the engine's model that can be read here. The engine is told to go on in any case.
    Raises TryLater when it does not answer.
    """
    if version.adapter is None:
        served = Path((await engine.server_info()).model_path)
        of_its_model = (served,) if model_path is None else (served, model_path)
        refusal = await asyncio.to_thread(unfit, Path(version.path), of_its_model)
        if refusal is not None:
            return _outcome(engine, version, refusal, 0.0, now_ms())
        loaded = await engine.lora_adapters()
        await forget(engine, [name for name in loaded if adapter_version(version.policy_id, name) is not None])
        return await swap(engine, version, now_ms, afresh=afresh)
    refusal = misnamed(version)
    try:
        if refusal is None and version.adapter not in await engine.lora_adapters():
            await engine.load_lora_adapter(version.adapter, version.path)
            if version.adapter not in await engine.lora_adapters():
                refusal = f"it does not list {version.adapter} after it was loaded"
    except EngineRefused as error:
        refusal = str(error)
    return _outcome(engine, version, refusal, 0.0, now_ms())


async def swap(
    engine: SwappingEngine, version: PolicyPublished, now_ms: Callable[[], int], *, afresh: bool = False
) -> PolicyActivated | PolicyRejected:
    """Let `engine` take full weights over; return the outcome.

    The pause is measured from the call to pause until the engine samples again, an upper bound of what clients see. The
    engine is told to go on in any case. Raises TryLater when it does not answer.
    """
    started = time.perf_counter()
    refusal: str | None = None
    try:
        await engine.pause(retract=afresh)
        await engine.update_weights(version.path, str(version.policy_version), flush_cache=afresh)
    except EngineRefused as error:
        refusal = str(error)
    finally:
        await engine.resume()
    pause_ms = (time.perf_counter() - started) * 1000
    told = await engine.weight_version()
    if refusal is None and not serves(Serving(version=told), version):
        refusal = f"it serves {told} after it took over {version.policy_version}"
    return _outcome(engine, version, refusal, pause_ms, now_ms())


async def forget(engine: SwappingEngine, adapters: list[str]) -> None:
    """Unload the adapters, each when the requests that run under it have ended."""
    for name in adapters:
        try:
            await engine.unload_lora_adapter(name)
        except (EngineRefused, TryLater) as error:
            log.info("adapter_kept engine=%s adapter=%s why=%s", engine.url, name, error)
        else:
            log.info("adapter_unloaded engine=%s adapter=%s", engine.url, name)


def _outcome(
    engine: SwappingEngine, version: PolicyPublished, refusal: str | None, pause_ms: float, at_ms: int
) -> PolicyActivated | PolicyRejected:
    if refusal is not None:
        log.error("policy_rejected engine=%s version=%d why=%s", engine.url, version.policy_version, refusal)
        return PolicyRejected(
            policy_id=version.policy_id,
            policy_version=version.policy_version,
            engine=engine.url,
            reason=refusal,
            rejected_at_ms=at_ms,
        )
    log.info("policy_activated engine=%s version=%d pause_ms=%.1f", engine.url, version.policy_version, pause_ms)
    return PolicyActivated(
        policy_id=version.policy_id,
        policy_version=version.policy_version,
        engine=engine.url,
        adapter=version.adapter,
        pause_ms=pause_ms,
        num_bytes=version.num_bytes,
        activated_at_ms=at_ms,
    )
