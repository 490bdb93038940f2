"""A judge's endpoint over real HTTP, that answers as it is told."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]


def completion_body(content: str | None, finish_reason: str = "stop") -> bytes:
    """A chat completion as OpenAI writes it."""
    body = {
        "id": "chatcmpl-1",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
    }
    return json.dumps(body).encode()


def completion(content: str | None, finish_reason: str = "stop") -> web.Response:
    """It as a response."""
    return web.Response(body=completion_body(content, finish_reason), content_type="application/json")


@dataclass
class Endpoint:
    """Where it listens, what it was sent, and what it does next."""

    answer: Answer
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    peers: set[object] = field(default_factory=set)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.peers.add(request.transport and request.transport.get_extra_info("peername"))
        self.keys.append(request.headers.get("Authorization"))
        self.bodies.append(await request.json())
        return await self.answer(self.bodies[-1])


@asynccontextmanager
async def endpoint(answer: Answer) -> AsyncIterator[Endpoint]:
    """The endpoint, as long as the block."""
    made = Endpoint(answer)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        made.url = f"http://{host}:{port}/v1"
        yield made
    finally:
        await runner.cleanup()
        await asyncio.sleep(0)  # lets closed transports go
