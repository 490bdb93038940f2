"""The headers and the body of an HTTP request, within limits of size and time."""

import asyncio
from collections.abc import Mapping

from starlette.types import Message, Receive, Scope

from clawstream.errors import ClawstreamError
from clawstream.gateway.requests.fields import BadRequest

_DISCARDED_BYTES = 64 * 2**20
_DISCARDED_S = 10.0


class ClientGone(ClawstreamError):
    """The client closed its connection before its request was whole; there is nobody to answer."""


def read_headers(scope: Scope) -> dict[str, str]:
    """Return the headers by lower-case name; of repeated ones, the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(headers: Mapping[str, str], receive: Receive, *, max_bytes: int, within_s: float) -> bytes:
    """Return the whole body, never holding more than `max_bytes` of it. Raises BadRequest."""
    try:
        async with asyncio.timeout(within_s):
            return await _read_body(headers, receive, max_bytes)
    except TimeoutError as error:
        message = f"The body did not come within {within_s:g} s. Send it faster."
        raise BadRequest(message, status=408, code="request_timeout") from error


async def _read_body(headers: Mapping[str, str], receive: Receive, max_bytes: int) -> bytes:
    coding = headers.get("content-encoding", "identity")
    if coding != "identity":
        raise BadRequest(f"The body is compressed ({coding[:20]}); send it as it is.", status=415)
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        if "expect" not in headers:  # a client that asks first (`Expect`) sends no body after a refusal
            await _discard(receive)
        raise too_large(f"{int(declared)} bytes", max_bytes)
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await _next(receive)
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > max_bytes:
            pieces.clear()
            await _discard(receive)
            raise too_large(f"more than {max_bytes} bytes", max_bytes)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def _discard(receive: Receive) -> None:
    """Read and drop the rest of a body, within limits, since a client that is still writing would miss the refusal."""
    left = _DISCARDED_BYTES
    try:
        async with asyncio.timeout(_DISCARDED_S):
            while left > 0:
                message = await _next(receive)
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


async def _next(receive: Receive) -> Message:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone("the client went away while it sent its request")
    return message


def too_large(found: str, max_bytes: int) -> BadRequest:
    """Return the refusal of a body, or of its record, for its size."""
    return BadRequest(
        f"The body is {found}; at most {max_bytes} bytes can be recorded. Shorten the conversation.",
        status=413,
        code="request_too_large",
    )
