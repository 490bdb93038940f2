"""Clients' keys: who has which, and what each may do. Pure.

The one rule: a key is shown once, to the person who made it; only its SHA-256 is kept. That is enough for 256 random
bits: nobody can try them all, so a slow hash or a salt would cost every request and protect nothing.
"""

import hashlib
import hmac
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from clawstream.errors import ConfigError

PREFIX = "cs-"
DEFAULT = "default"  # the name of gateway.api_key
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_Limit = Annotated[int | None, Field(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What one key may do; None: as the settings say."""

    max_concurrent: int | None = None
    requests_per_minute: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One client's key, as it stands in the file. Its name stands in the audit trail, so a revoked one is kept."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created_at: str  # ISO 8601, UTC
    revoked_at: str | None = None
    max_concurrent: _Limit = None
    requests_per_minute: _Limit = None

    @property
    def allowance(self) -> Allowance:
        """What the key may do."""
        return Allowance(max_concurrent=self.max_concurrent, requests_per_minute=self.requests_per_minute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks; `name` None: no keys are in use."""

    name: str | None
    allowance: Allowance = Allowance()


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys ever made, as in their file; immutable: a change returns another ring."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    keys: tuple[Key, ...]
    open: bool = False  # a person said that programs of this machine need no key any more

    @property
    def in_force(self) -> tuple[Key, ...]:
        """The keys that open the gateway."""
        return tuple(key for key in self.keys if key.revoked_at is None)

    def holder(self, shown: str) -> Caller | None:
        """Return whose key was shown; None: nobody's. All keys are compared, each in constant time."""
        digest = sha256(shown)
        found = None
        for key in self.in_force:
            if hmac.compare_digest(digest, key.sha256):
                found = Caller(name=key.name, allowance=key.allowance)
        return found

    def with_key(self, key: Key) -> "KeyRing":
        """Return the ring with `key` in it; a revoked name can be given again. Raises ConfigError."""
        if not NAME.fullmatch(key.name) or key.name == DEFAULT:
            raise ConfigError(
                f"the name {key.name!r} can't be given to a key; nothing was added. Use 1 to 64 letters, digits or "
                f". _ @ - (and not {DEFAULT!r}, which is gateway.api_key)"
            )
        if any(known.name == key.name for known in self.in_force):
            raise ConfigError(
                f"there is a key {key.name!r} already; nothing was added. Revoke it, or take another name"
            )
        return KeyRing((*(known for known in self.keys if known.name != key.name), key))

    def without(self, name: str, *, revoked_at: str) -> "KeyRing":
        """Return the ring in which the key `name` opens nothing. Raises ConfigError."""
        names = [key.name for key in self.in_force]
        if name not in names:
            raise ConfigError(
                f"no key {name!r} is in force; nothing was revoked. There are: {', '.join(names) or 'none'}"
            )
        return KeyRing(tuple(replace(key, revoked_at=revoked_at) if key.name == name else key for key in self.keys))

    def opened(self) -> "KeyRing":
        """Return the ring under which programs of this machine need no key. Raises ConfigError."""
        if self.in_force:
            names = ", ".join(key.name for key in self.in_force)
            raise ConfigError(f"keys are in force ({names}); nothing was changed. Revoke them first")
        return replace(self, open=True)


def sha256(shown: str) -> str:
    """Return the hash of a key, as hexadecimal digits."""
    return hashlib.sha256(shown.encode("utf-8", "surrogatepass")).hexdigest()


def shown_key(headers: Mapping[str, str]) -> str | None:
    """Return the key in `Authorization: Bearer` or `x-api-key`; None: neither is there."""
    scheme, _, found = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and found.strip():
        return found.strip()
    return headers.get("x-api-key", "").strip() or None


_FILE = TypeAdapter(KeyRing)


def read_ring(text: str, where: str) -> KeyRing:
    """Return the ring in a file's text. Raises ConfigError, which quotes nothing of the file."""
    try:
        return _FILE.validate_json(text)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"{where} is no file of keys ({problems}). {mend(where)}") from None


def mend(where: str) -> str:
    """Return what to do about a file that can't be read as keys."""
    quoted = shlex.quote(where)
    return (
        f"Nothing was changed. Mend it, or put it aside and give everybody a new key: mv {quoted} "
        f"{shlex.quote(where + '.broken')} && clawstream keys add NAME. Until then a gateway that runs keeps the keys "
        "that it has read"
    )


def write_ring(ring: KeyRing) -> str:
    """Return the text of the file, which `read_ring` reads."""
    return _FILE.dump_json(ring, indent=1, exclude_none=True, exclude_defaults=True).decode() + "\n"
