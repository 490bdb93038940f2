"""Asks an engine what it samples with now, before a request whose tokens or scores are to bear a version."""

from typing import NamedTuple, Protocol

from clawstream.inference.engines.adapters import adapter_version, policy_version


class Served(NamedTuple):
    """The weights or adapter that answer a request for the newest version."""

    weights: int
    version: int
    adapter: str | None  # the one that has the version; None: the weights have it


class VersionedEngine(Protocol):
    """What is needed of an engine."""

    async def weight_version(self) -> str | None: ...
    async def lora_adapters(self) -> tuple[str, ...]: ...


async def served(engine: VersionedEngine, policy_id: str) -> Served:
    """Return what the engine serves now. Raises TryLater where it names nothing, or no version of ours."""
    weights = policy_version(await engine.weight_version())
    adapters = {adapter_version(policy_id, name): name for name in await engine.lora_adapters()}
    newest = max((version for version in adapters if version is not None), default=weights)
    return Served(weights, max(weights, newest), adapters[newest] if newest > weights else None)
