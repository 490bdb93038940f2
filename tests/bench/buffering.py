"""A proxy in the pattern of OpenClaw-RL's server, to compare with: `python -m tests.bench.buffering UPSTREAM PORT`.

Each request opens a client of its own, asks upstream for the whole answer, and shows it as a stream of two chunks
once it is there. It neither tokenises nor records, so it does less than the original.
"""

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


def build_app(upstream: str) -> Starlette:
    """Return the proxy for the chat endpoint at `upstream`."""

    async def chat(request: Request) -> Response:
        body = await request.json()
        streamed = body.pop("stream", False)
        async with httpx.AsyncClient(timeout=600.0) as client:
            answer = await client.post(f"{upstream}/v1/chat/completions", json=body | {"stream": False})
        content = answer.json()
        if answer.status_code != 200 or not streamed:
            return JSONResponse(content, answer.status_code)
        return StreamingResponse(_as_stream(content), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


async def _as_stream(content: dict[str, Any]) -> AsyncIterator[str]:
    (choice,) = content["choices"]
    frame = {key: content[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for delta, logprobs, reason in (
        (choice["message"], choice["logprobs"], None),
        ({}, None, choice["finish_reason"]),
    ):
        shown: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        yield f"data: {json.dumps(frame | {'choices': [shown]})}\n\n"
    yield "data: [DONE]\n\n"


if __name__ == "__main__":
    uvicorn.run(build_app(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", loop="uvloop")
