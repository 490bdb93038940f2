"""Limits on HTTP: how much of a peer's response is read, and which web pages may send requests to our servers.

A peer decides neither how much memory its response takes, nor where else our request goes: redirects are not followed.
Pages of other sites must not use our servers. A browser sends a request that looks like a form's without asking the
server first. So a body has to be declared as JSON, and the page has to be of this machine (Origin). A site can point
its own name at the loopback address, so a request that arrives there has to name this machine (Host) or show a key.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import ip_address
from typing import NamedTuple, TypedDict
from urllib.parse import urlsplit

import aiohttp
import orjson
from aiohttp import web
from pydantic import SecretStr
from starlette.types import ASGIApp, Receive, Scope, Send

from clawstream.config import LOOPBACK

SHOWN_CHARACTERS = 300
_ERROR_BYTES = 16 * 2**10
_ZLIB_OR_GZIP = 32 + zlib.MAX_WBITS
PLAIN = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_JSON = "application/json"


class RequestArguments(TypedDict):
    """The aiohttp arguments of every request to a peer."""

    allow_redirects: bool
    auto_decompress: bool


# A redirect would send the conversation, and the key in the headers, elsewhere.
ASKING: RequestArguments = {"allow_redirects": False, "auto_decompress": False}


def bearer(key: SecretStr | None) -> dict[str, str]:
    """Return the headers that show a key."""
    return {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}


class Body(NamedTuple):
    """The part of a body that arrived; `wrong` says why it is incomplete or unreadable."""

    content: bytes
    wrong: str | None = None


async def read_body(response: aiohttp.ClientResponse, *, most_bytes: int, until: float | None = None) -> Body:
    """Return the body, of which no more than `most_bytes` are held.

    At `until`, on the event loop's clock, returns what arrived by then. Raises TimeoutError where that is blank, and
    aiohttp.ClientError where the connection is lost.
    """
    found = bytearray()
    try:
        async with asyncio.timeout_at(until):
            async for piece in response.content.iter_any():
                found += piece
                if len(found) > most_bytes:
                    return Body(bytes(found[:most_bytes]), f"it has more than {most_bytes} bytes")
    except TimeoutError:
        if not found.strip():
            raise
        return Body(bytes(found), f"it did not end in time, after {len(found)} bytes")
    return _decompressed(bytes(found), response.headers.get("Content-Encoding", "identity"), most_bytes)


async def read_error(response: aiohttp.ClientResponse, *, until: float | None = None) -> bytes:
    """Return the beginning of a refusal's body; empty where it can't be read, since the status alone decides."""
    if 300 <= response.status < 400:
        where = response.headers.get("Location", "nowhere")[:SHOWN_CHARACTERS]
        return f"it redirects to {where}, and redirects are not followed: name the address itself".encode()
    try:
        return (await read_body(response, most_bytes=_ERROR_BYTES, until=until)).content
    except (TimeoutError, aiohttp.ClientError):
        return b""


def shown(text: str) -> str:
    """Return a peer's words, cut to the length that an error message echoes."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def parsed(raw: bytes) -> object:
    """Return the JSON of a body; None where the body is not JSON."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


def _decompressed(raw: bytes, encoding: str, most_bytes: int) -> Body:
    if encoding in ("identity", ""):
        return Body(raw)
    if encoding not in ("gzip", "deflate"):
        return Body(b"", f"it is compressed ({shown(encoding)}), which was not asked for")
    inflating = zlib.decompressobj(_ZLIB_OR_GZIP)
    try:
        content = inflating.decompress(raw, most_bytes)
    except zlib.error as error:
        return Body(b"", f"it is no {encoding} ({error})")
    if inflating.eof:
        return Body(content)
    return Body(content, f"it is cut off, or has more than {most_bytes} bytes once its {encoding} is undone")


class Refusal(NamedTuple):
    """Why a request is not let in."""

    status: int
    message: str


def refusal(method: str, headers: Mapping[str, str], came_in_by: str | None) -> Refusal | None:
    """Return why the request is not let in; None: it is.

    `headers` are by lower-case name; `came_in_by` is the local address that the request came to.
    """
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None and _hostname(origin) not in LOOPBACK:
        return Refusal(403, f"Origin is {origin[:100]}; no page of another site may use this. Nothing was done.")
    if "authorization" not in headers and came_in_by in LOOPBACK and not _means_an_address(_hostname(f"//{host}")):
        return Refusal(403, f"Host is {host[:100]}; expected localhost or an address, as this came in on {came_in_by}.")
    kind = headers.get("content-type", "").split(";")[0].strip().lower()
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if method not in ("GET", "HEAD") and has_body and kind != _JSON:
        return Refusal(415, f"Content-Type is {kind[:100] or 'missing'}; expected {_JSON}. Nothing was done.")
    return None


class OriginGuard:
    """An ASGI application that lets only allowed requests reach `app`; a refusal is SGLang's error object."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            server = scope.get("server")
            refused = refusal(scope["method"], headers, server[0] if server else None)
            if refused is not None:
                said = [(b"content-type", _JSON.encode()), (b"connection", b"close")]
                await send({"type": "http.response.start", "status": refused.status, "headers": said})
                await send({"type": "http.response.body", "body": _body(refused)})
                return
        await self._app(scope, receive, send)


@web.middleware
async def guard_origin(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Let only allowed requests reach an aiohttp application."""
    name = None if request.transport is None else request.transport.get_extra_info("sockname")
    headers = {key.lower(): value for key, value in request.headers.items()}
    refused = refusal(request.method, headers, name[0] if isinstance(name, tuple) else None)
    if refused is None:
        return await handler(request)
    return web.Response(body=_body(refused), status=refused.status, content_type=_JSON)


def _body(refused: Refusal) -> bytes:
    return orjson.dumps({"error": {"message": refused.message}})


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _means_an_address(name: str | None) -> bool:
    """Whether the name is an address, or a name that no page can have."""
    if name is None:
        return False
    try:
        ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(".localhost")
    return True
