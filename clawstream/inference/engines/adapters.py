"""The names of policy versions on engines: weights, adapters, cache keys. Pure.

The one rule: an adapter's name ends with its policy version, so the names that an engine has loaded tell anybody which
versions it serves.
"""

import re

from clawstream.errors import TryLater

BASE_VERSION = 0
_BASE_NAMES = ("default", "base")  # what SGLang calls the weights that it was started with
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_VERSION = re.compile(r".+-v([0-9]{1,18})", re.ASCII | re.DOTALL)


def policy_version(name: str | None) -> int:
    """Return the version that an engine's weights are named after; the weights that it was started with are version 0.

    Raises TryLater for a name that is no version of ours.
    """
    if name is None or name in _BASE_NAMES:
        return BASE_VERSION
    if not _NUMBER.fullmatch(name):
        raise TryLater(
            f"the engine's weights are named {name[:100]!r}; expected a version number. Start it without a name"
        )
    return int(name)


def cache_key(policy_id: str, weights: int, tenant: str | None = None) -> str:
    """Return the key under which a tenant's requests to these weights share cached prompts."""
    return f"{policy_id}:{weights}" if tenant is None else f"{policy_id}:{weights}:{tenant}"


def adapter_name(policy_id: str, version: int) -> str:
    """Return the name under which engines serve this version of the policy."""
    return f"{policy_id}-v{version}"


def adapter_version(policy_id: str, name: str) -> int | None:
    """Return the version that the name stands for; None: it is no adapter of this policy."""
    found = _VERSION.fullmatch(name)
    version = None if found is None else int(found.group(1))
    return version if version is not None and name == adapter_name(policy_id, version) else None
