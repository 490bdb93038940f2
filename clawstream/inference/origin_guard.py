"""Guards every part that listens beside the gateway: no web page of another site gets an answer.

A browser sends a page's request unasked as long as it looks like a form. So a body has to be declared as JSON, and a
page has to come from this machine (Origin). A request by the loopback address has to name this machine (Host), since a
page can point its own name at that address. A request that shows a key comes from no page.
"""

from collections.abc import Awaitable, Callable, Mapping
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

import orjson
from aiohttp import web
from starlette.types import ASGIApp, Receive, Scope, Send

from clawstream.config import LOOPBACK

_JSON = "application/json"


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
    """An ASGI application behind the door; a refusal is SGLang's error object."""

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
    """Let in what may come in to an aiohttp application."""
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
    if name is None or name == "localhost" or name.endswith(".localhost"):
        return name is not None
    try:
        ip_address(name)
    except ValueError:
        return "." not in name
    return True
