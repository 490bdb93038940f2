"""vLLM's routes as its client uses them, in a few lines: no model, and whatever goes wrong is said by the test.

What the real vLLM does is tested in tests/parts/engine/contract; this is for what it does not do on demand.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

PROCESSED = (0.0, -9999.0)  # what a server with --logprobs-mode processed_logprobs answers to the probe


@dataclass(slots=True, kw_only=True)
class ScriptedVllm:
    """What the server is and says; `asked` is every call but those that only look."""

    name: str = "default"
    folder: str = "/models/first"
    paused: bool = False
    probed: tuple[float, float] = PROCESSED
    unreadable: tuple[str, ...] = ()  # folders that it fails to load
    empties: bool = True
    dead: bool = False
    dev_mode: bool = True
    backend: str = "FlashAttentionImpl"
    ends_after: int = 3  # the events of an answer, of which the third counts the tokens
    num_probes: int = 0
    asked: list[str] = field(default_factory=list)

    async def look(self, request: web.Request) -> web.Response:
        if request.path == "/health":
            return web.Response(status=503 if self.dead else 200)
        card = {"id": "model", "root": "/models/first", "parent": None, "max_model_len": 64}
        return web.json_response({
            "/weight_info": {"weight_version": self.name}, "/is_paused": {"is_paused": self.paused},
            "/v1/models": {"data": [card]},
        }[request.path])  # fmt: skip

    async def change(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("method") == "get_model_inspection":
            return web.json_response({"results": [f"(attn): Attention(head_size=32, backend={self.backend})"]})
        said = {"/update_weight_version": "new_version", "/collective_rpc": "kwargs"}.get(request.path)
        value = body[said]["weights_path"] if said == "kwargs" else body.get(said)
        self.asked.append(f"{request.path} {value}" if value else request.path_qs)
        match request.path:
            case "/pause" | "/resume":
                self.paused = request.path == "/pause"
            case "/update_weight_version":
                self.name = value
            case "/collective_rpc" if value in self.unreadable or self.dead:
                return web.json_response({"error": {"message": "no weights at <path>", "code": 500}}, status=500)
            case "/collective_rpc":
                self.folder = value
            case "/reset_prefix_cache":
                return web.json_response({"success": self.empties})
        return web.json_response({})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        while self.paused:
            await asyncio.sleep(0.01)
        if body.get("model") is not None:
            error = {"message": f"The model `{body['model']}` does not exist.", "type": "NotFoundError", "code": 404}
            return web.json_response({"error": error}, status=404)
        first, second = self.probed
        likeliest = [{"token_id": 5, "logprob": first, "rank": 1}, {"token_id": 6, "logprob": second, "rank": 2}]
        content = [{"token_id": 5, "logprob": first, "rank": 1, "top_logprobs": likeliest}]
        choice = {"token_ids": [5], "finish_reason": None, "logprobs": {"content": content}, "weight_versions": None}
        if not body["stream"]:
            self.num_probes += 1
            return web.json_response({"choices": [choice]})
        spans = [{"version": self.name, "start": 0, "end": 2}]
        last = {**choice, "finish_reason": "length", "weight_versions": spans}
        usage = {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
        events = [{"choices": [choice]}, {"choices": [last]}, {"choices": [], "usage": usage}][: self.ends_after]
        text = ": keep-alive\n\n" + "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return web.Response(text=f"{text}data: [DONE]\n\n", content_type="text/event-stream")


@asynccontextmanager
async def serving_vllm(server: ScriptedVllm) -> AsyncIterator[str]:
    """Yield the server's address for the length of the block."""
    app = web.Application()
    app.router.add_post("/inference/v1/generate", server.generate)
    looks: list[Any] = ["/v1/models", "/health"]
    if server.dev_mode:
        looks += ["/weight_info", "/is_paused"]
        for path in ("/pause", "/resume", "/update_weight_version", "/collective_rpc", "/reset_prefix_cache"):
            app.router.add_post(path, server.change)
    for path in looks:
        app.router.add_get(path, server.look)
    async with TestServer(app) as running:
        yield str(running.make_url("")).rstrip("/")
