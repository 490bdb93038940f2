"""What LoRA adapters are called. Pure.

The one rule: the name of an adapter ends with its policy version, so what an engine has loaded says which versions it
serves, whoever asks and whatever they missed.
"""

import re

_VERSION = re.compile(r".+-v([0-9]{1,18})", re.ASCII | re.DOTALL)


def adapter_name(policy_id: str, version: int) -> str:
    """Return the name under which engines serve this version of the policy."""
    return f"{policy_id}-v{version}"


def adapter_version(policy_id: str, name: str) -> int | None:
    """Return the version that the name stands for; None: it is no adapter of this policy."""
    found = _VERSION.fullmatch(name)
    version = None if found is None else int(found.group(1))
    return version if version is not None and name == adapter_name(policy_id, version) else None
