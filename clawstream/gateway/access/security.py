"""Guards every route that answers: checks who asks, and whether there is room.

A request without a key in force, or beyond a limit, is refused before its body is read. Only a limit that is reached
while the body arrives, or by `n`, refuses it later.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clawstream.config import LOOPBACK, GatewaySettings
from clawstream.gateway.access.key_file import WatchedKeys
from clawstream.gateway.access.keys import (
    DEFAULT,
    Allowance,
    Caller,
    Key,
    KeyRing,
    Limits,
    Rate,
    TooMuch,
    sha256,
    shown_key,
)
from clawstream.gateway.answering.admission import CALLER, GROW
from clawstream.gateway.http.metrics import Metrics
from clawstream.gateway.requests.body import read_headers
from clawstream.gateway.requests.fields import BadRequest
from clawstream.inference.http_borders import refusal

Refuse = Callable[[Send, BadRequest], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Guard:
    """The guard of all routes."""

    keys: WatchedKeys
    default_key: Key | None
    limits: Limits
    metrics: Metrics
    here_alone: bool = True  # only this machine's programs can connect
    now_s: Callable[[], float] = time.monotonic

    @classmethod
    def of(cls, settings: GatewaySettings, keys: WatchedKeys, metrics: Metrics) -> "Guard":
        """Return the guard of a gateway with these settings; gateway.api_key is the key named "default"."""
        secret = settings.api_key
        hashed = None if secret is None else sha256(secret.get_secret_value())
        default = None if hashed is None else Key(name=DEFAULT, sha256=hashed, created_at="")
        allowance = Allowance(
            max_concurrent=settings.max_concurrent_per_key, requests_per_minute=settings.requests_per_minute_per_key
        )
        limits = Limits(allowance, settings.max_in_flight)
        return cls(keys, default, limits, metrics, here_alone=settings.host in LOOPBACK)

    def caller(self, headers: dict[str, str]) -> Caller:
        """Return who asks; if no keys are in use, any program on this machine may. Raises BadRequest (401, 403)."""
        if self.default_key is None and self.here_alone and not self.keys.in_use:
            foreign = foreign_page(headers)
            if foreign is not None:
                raise foreign
            return Caller(name=None)
        shown = shown_key(headers)
        if shown is None:
            raise _unauthorized(
                "No API key was sent; expected the header `Authorization: Bearer KEY`, or `x-api-key: KEY`."
            )
        ring = self.keys.ring()
        whole = ring if self.default_key is None else KeyRing((*ring.keys, self.default_key))
        caller = whole.holder(shown)
        if caller is None:
            raise _unauthorized(
                "The API key is none of this gateway's, or was revoked; ask for one of your own "
                "(clawstream keys add NAME)."
            )
        return caller

    def guarding(self, endpoint: ASGIApp, refuse: Refuse) -> ASGIApp:
        """Return `endpoint` behind the guard, which refuses requests by `refuse`."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                caller = self.caller(read_headers(scope))
                rate = self.limits.enter(caller, self.now_s(), num_keys=self._num_keys())
            except BadRequest as refused:
                self.metrics.requests.labels("refused" if refused.status < 500 else "unavailable").inc()
                await refuse(self._telling(send, refused), refused)
                return
            begun, num_more = False, 0

            def grow(number: int) -> None:
                nonlocal num_more
                self._let_in(lambda: self.limits.grow(caller, number, num_keys=self._num_keys()))
                num_more += number

            async def receiving() -> Message:
                nonlocal begun
                message = await receive()
                if not begun and message["type"] == "http.request" and not message.get("more_body", False):
                    self._let_in(self.limits.begin)
                    begun = True
                return message

            try:
                scope[CALLER], scope[GROW] = caller, grow
                await endpoint(scope, receiving, send if rate is None else with_headers(send, rate))
            finally:
                self.limits.leave(caller, begun=begun, num_more=num_more)

        return guarded

    def _num_keys(self) -> int:
        return len(self.keys.ring().in_force) + (self.default_key is not None)

    def _let_in(self, check: Callable[[], None]) -> None:
        """Run a check of the limits, and count a refusal in the metrics. Raises TooMuch."""
        try:
            check()
        except TooMuch as refused:
            self.metrics.limited.labels(refused.limit).inc()
            raise

    def _telling(self, send: Send, refused: BadRequest) -> Send:
        """Return `send` with the key's rate in the headers, where that is what was exceeded; count the limit."""
        if not isinstance(refused, TooMuch):
            return send
        self.metrics.limited.labels(refused.limit).inc()
        return send if refused.rate is None else with_headers(send, refused.rate)


def _unauthorized(message: str) -> BadRequest:
    return BadRequest(message, status=401, code="invalid_api_key")


def foreign_page(headers: Mapping[str, str]) -> BadRequest | None:
    """Return the refusal (403) of a request by a web page of another site; None: it comes from no such page.

    DNS rebinding: the name of a page's own site can point at this machine's address. To the browser the gateway is then
    the same site, so the page may set any header but Host. Hence only Origin and Host count here, and a key does not.
    """
    said = {name: headers[name] for name in ("origin", "host") if name in headers}
    refused = refusal("GET", {"host": "localhost"} | said, "127.0.0.1")  # no browser leaves Host out
    if refused is None:
        return None
    return BadRequest(
        f"{refused.message} A gateway without keys is for this machine's programs alone. Add a key (clawstream keys "
        "add NAME).",
        status=403,
        code="foreign_origin",
    )


def with_headers(send: Send, rate: Rate) -> Send:
    """Return a `send` whose answer has the rate's headers."""

    def sending(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *rate.headers()]
        return send(message)

    return sending
