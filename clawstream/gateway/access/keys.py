"""Clients' keys, and the limits on each key's requests. Pure: the time is an argument.

A key is shown once, to the person who made it; only its SHA-256 is kept. A key has 256 random bits, too many to guess,
so a slow hash or a salt would cost time on every request and protect nothing.

Every request that enters leaves exactly once. It counts against its key from the start, and against the gateway's
limit (in flight) only once its body has arrived.
"""

import hashlib
import hmac
import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from clawstream.errors import ConfigError
from clawstream.events import key_of_agent
from clawstream.gateway.requests.fields import BadRequest

PREFIX = "cs-"
DEFAULT = "default"  # the name of gateway.api_key
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_Limit = Annotated[int | None, Field(ge=1)]
AGAIN_AFTER_S = 1
_SHARES = 4  # where no limit is set and there are several keys, each may have 1 / _SHARES of max_in_flight
_ENTERED_AT_MOST = 4  # times max_in_flight: the most requests, including those whose bodies are still arriving
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The limits of one key; None: as the settings say."""

    max_concurrent: int | None = None
    requests_per_minute: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One client's key, as in the key file. A revoked key stays there for the audit trail until its name is reused."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created_at: str  # ISO 8601, UTC
    revoked_at: str | None = None
    max_concurrent: _Limit = None
    requests_per_minute: _Limit = None

    @property
    def allowance(self) -> Allowance:
        """The key's limits."""
        return Allowance(max_concurrent=self.max_concurrent, requests_per_minute=self.requests_per_minute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The client that makes a request; `name` None: no keys are in use."""

    name: str | None
    allowance: Allowance = Allowance()


def named_agent(metadata: Mapping[str, str], entry: str, caller: Caller) -> str | None:
    """Return the key of the policy that a request's metadata names for this caller; None: it names none.

    Raises BadRequest for a value that can't name one.
    """
    value = metadata.get(entry)
    if value is None:
        return None
    if not NAME.fullmatch(value):
        raise BadRequest(
            f"metadata.{entry} is {value[:70]!r}, and names the adapter that answers; expected 1 to 64 letters, digits "
            "or . _ @ -, the first a letter or a digit. Nothing was generated; leave it out for the adapter that all "
            "share.",
            param=f"metadata.{entry}",
        )
    return key_of_agent(caller.name, value)


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys of the key file, revoked ones too; immutable: a change returns another ring."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    keys: tuple[Key, ...]
    open: bool = False  # a person allowed programs on this machine to ask without a key

    @property
    def in_force(self) -> tuple[Key, ...]:
        """The keys that are not revoked."""
        return tuple(key for key in self.keys if key.revoked_at is None)

    def holder(self, shown: str) -> Caller | None:
        """Return the caller whose key was shown; None: no key in force. Each of those is compared, in constant time."""
        digest = sha256(shown)
        found = None
        for key in self.in_force:
            if hmac.compare_digest(digest, key.sha256):
                found = Caller(name=key.name, allowance=key.allowance)
        return found

    def with_key(self, key: Key) -> "KeyRing":
        """Return a ring with `key` in place of any revoked key of its name, and not `open`. Raises ConfigError."""
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
        """Return the ring with the key `name` revoked. Raises ConfigError."""
        names = [key.name for key in self.in_force]
        if name not in names:
            raise ConfigError(
                f"no key {name!r} is in force; nothing was revoked. There are: {', '.join(names) or 'none'}"
            )
        return KeyRing(tuple(replace(key, revoked_at=revoked_at) if key.name == name else key for key in self.keys))

    def opened(self) -> "KeyRing":
        """Return the ring with `open` set: programs on this machine need no key. Raises ConfigError."""
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
    """Return the advice for a key file that can't be read."""
    quoted = shlex.quote(where)
    return (
        f"Nothing was changed. Mend it, or put it aside and give everybody a new key: mv {quoted} "
        f"{shlex.quote(where + '.broken')} && clawstream keys add NAME. Until then a gateway that runs keeps the keys "
        "that it has read"
    )


def write_ring(ring: KeyRing) -> str:
    """Return the text of the file, which `read_ring` reads."""
    return _FILE.dump_json(ring, indent=1, exclude_none=True, exclude_defaults=True).decode() + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A token bucket that limits a key's requests; it refills steadily and holds a minute's requests at most."""

    tokens: float
    at_s: float

    def filled(self, per_minute: int, now_s: float) -> "Bucket":
        """Return the bucket at `now_s`; a clock that goes back removes no tokens."""
        grown = self.tokens + max(0.0, now_s - self.at_s) * per_minute / _MINUTE_S
        return Bucket(tokens=min(grown, float(per_minute)), at_s=max(now_s, self.at_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A key's remaining requests by the minute, as in OpenAI's headers."""

    per_minute: int
    remaining: int
    full_in_s: float

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return x-ratelimit-{limit,remaining,reset}-requests."""
        return [
            (b"x-ratelimit-limit-requests", b"%d" % self.per_minute),
            (b"x-ratelimit-remaining-requests", b"%d" % self.remaining),
            (b"x-ratelimit-reset-requests", duration(self.full_in_s).encode("ascii")),
        ]


class Limits:
    """Counts the requests that are here and in flight, and each key's recent rate."""

    def __init__(self, defaults: Allowance, max_in_flight: int) -> None:
        self._defaults = defaults
        self._max_in_flight = max_in_flight
        self._here: Counter[str | None] = Counter()
        self.in_flight = 0  # requests whose bodies have arrived, and that have not left
        self._buckets: dict[str | None, Bucket] = {}

    def enter(self, caller: Caller, now_s: float, *, num_keys: int = 1) -> Rate | None:
        """Count a new request against its key; return the key's rate, or None if it has no limit.

        Each of several keys has a share of the gateway's room, unless its allowance or the settings say otherwise.
        Raises TooMuch without counting the request.
        """
        if self._here.total() >= self._max_in_flight * _ENTERED_AT_MOST:
            raise self._full()
        self._check_room(1)
        self._check_share(caller, 1, num_keys)
        rate = self._take(caller, now_s)
        self._here[caller.name] += 1
        return rate

    def begin(self) -> None:
        """Count an entered request as in flight, since its body has arrived. Raises TooMuch without counting it."""
        self._check_room(1)
        self.in_flight += 1

    def grow(self, caller: Caller, num_more: int, *, num_keys: int = 1) -> None:
        """Count `num_more` further answers of a request in flight, each as one request.

        Raises TooMuch, or BadRequest if there can never be room for so many; then none is counted.
        """
        share = self._at_once(caller, num_keys)
        most = self._max_in_flight if share is None else min(share, self._max_in_flight)
        if num_more >= most:
            raise BadRequest(
                f"n is {num_more + 1}, and each choice counts as a request in flight, of which there may be {most} "
                "(limits.md); nothing was generated. Ask for fewer.",
                param="n",
            )
        self._check_room(num_more)
        self._check_share(caller, num_more, num_keys)
        self._here[caller.name] += num_more
        self.in_flight += num_more

    def leave(self, caller: Caller, *, begun: bool, num_more: int = 0) -> None:
        """End an entered request; `begun`: it was in flight, with `num_more` answers besides the first."""
        assert self._here[caller.name] > num_more
        self._here[caller.name] -= 1 + num_more
        self.in_flight -= begun + num_more
        if not self._here[caller.name]:
            del self._here[caller.name]

    def _at_once(self, caller: Caller, num_keys: int) -> int | None:
        at_once = caller.allowance.max_concurrent or self._defaults.max_concurrent
        if at_once is None and num_keys > 1:
            return max(1, self._max_in_flight // _SHARES)
        return at_once

    def _check_room(self, number: int) -> None:
        if self.in_flight + number > self._max_in_flight:
            raise self._full()

    def _check_share(self, caller: Caller, number: int, num_keys: int) -> None:
        at_once = self._at_once(caller, num_keys)
        if at_once is not None and self._here[caller.name] + number > at_once:
            raise TooMuch(
                "key_concurrency",
                f"This key may have {at_once} requests in flight, and would have {self._here[caller.name] + number}; "
                "nothing was generated. Wait until others have ended.",
                status=429,
                retry_after_s=AGAIN_AFTER_S,
            )

    def _full(self) -> "TooMuch":
        return TooMuch(
            "gateway",
            f"The gateway is at its limit (gateway.max_in_flight): it answers {self._max_in_flight} requests at most, "
            "and has no room for this, or has too many bodies on their way; nothing was generated. Try again.",
            status=503,
            retry_after_s=AGAIN_AFTER_S,
        )

    def _take(self, caller: Caller, now_s: float) -> Rate | None:
        per_minute = caller.allowance.requests_per_minute or self._defaults.requests_per_minute
        if per_minute is None:
            return None
        full = Bucket(tokens=float(per_minute), at_s=now_s)
        bucket = self._buckets.get(caller.name, full).filled(per_minute, now_s)
        if bucket.tokens < 1:
            wait_s = (1 - bucket.tokens) * _MINUTE_S / per_minute
            raise TooMuch(
                "key_rate",
                f"This key may make {per_minute} requests a minute, and has made them; nothing was generated. Try "
                f"again in {duration(wait_s)}.",
                status=429,
                retry_after_s=math.ceil(wait_s),
                rate=_rate(bucket, per_minute),
            )
        bucket = Bucket(tokens=bucket.tokens - 1, at_s=bucket.at_s)
        self._buckets[caller.name] = bucket
        return _rate(bucket, per_minute)


class TooMuch(BadRequest):
    """A limit is reached, named by `limit`: gateway, key_concurrency or key_rate."""

    def __init__(self, limit: str, message: str, *, status: int, retry_after_s: int, rate: Rate | None = None) -> None:
        ours = status == 503
        super().__init__(
            message,
            status=status,
            code="overloaded" if ours else "rate_limit_exceeded",
            kind="server_error" if ours else "requests",
            retry_after_s=retry_after_s,
        )
        self.limit = limit
        self.rate = rate


def duration(seconds: float) -> str:
    """Return a time as OpenAI's headers write it: 12ms, 1.5s, 6m0s."""
    ms = math.ceil(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    return f"{minutes}m{rest_ms // 1000}s" if minutes else f"{rest_ms / 1000:g}s"


def _rate(bucket: Bucket, per_minute: int) -> Rate:
    missing = per_minute - bucket.tokens
    return Rate(per_minute=per_minute, remaining=int(bucket.tokens), full_in_s=missing * _MINUTE_S / per_minute)
