"""A policy of two styles behind the OpenAI API, to talk to in tests: what it is asked it keeps, in order."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PROMPT_TOKENS = 11  # of each request, as the server says


@dataclass(slots=True)
class ChatServer:
    """Answers sums; in the plain style once it was asked to, by a complaint or a hint."""

    answers: Callable[[list[dict[str, str]]], str]
    url: str = ""
    asked: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    failing: bool = False  # 503 instead of an answer
    cutting: bool = False  # streams end without a finish reason
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def complete(self, request: Request) -> Response:
        """The one route."""
        body = orjson.loads(await request.body())
        self.asked.append((dict(request.headers), body))
        await self.may_answer.wait()
        if self.failing:
            return JSONResponse({"error": {"message": "away", "type": "server_error"}}, 503)
        text = self.answers(body["messages"])
        if body.get("stream"):
            return StreamingResponse(self._chunks(text), media_type="text/event-stream")
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 7, "total_tokens": PROMPT_TOKENS + 7}
        return JSONResponse(_reply("chat.completion", choice) | {"usage": usage}, headers={"x-policy-version": "3"})

    async def _chunks(self, text: str) -> AsyncIterator[str]:
        for piece in re.findall(r"[\s\S]{1,10}", text):
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
            yield f"data: {orjson.dumps(_reply('chat.completion.chunk', choice)).decode()}\n\n"
        if not self.cutting:
            choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
            yield f"data: {orjson.dumps(_reply('chat.completion.chunk', choice)).decode()}\n\n"
        yield "data: [DONE]\n\n"


def answer(messages: list[dict[str, str]]) -> str:
    """Return the right sum, formatted unless something has been said about it."""
    left, right = map(int, re.findall(r"(\d+) \+ (\d+)", messages[0]["content"])[0])
    steps = f"{left % 10}+{right % 10}={left % 10 + right % 10}", f"{left // 10 * 10}+{right // 10 * 10}=..."
    if len(messages) == 1 and "hint" not in messages[0]["content"]:
        return f"## Answer\n**{left + right}**"
    tens = left // 10 * 10 + right // 10 * 10
    return f"{steps[0]} and {steps[1].replace('...', str(tens))}, so {left + right}"


@asynccontextmanager
async def serving(answers: Callable[[list[dict[str, str]]], str] = answer) -> AsyncIterator[ChatServer]:
    """The server, on a free port; it answers at once unless `may_answer` is cleared."""
    chat = ChatServer(answers)
    chat.may_answer.set()
    app = Starlette(routes=[Route("/v1/chat/completions", chat.complete, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1))
    listening = socket.create_server(("127.0.0.1", 0))  # who comes before it is served waits in its queue
    chat.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listening]))
        try:
            yield chat
        finally:
            chat.may_answer.set()
            server.should_exit = True


def _reply(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "policy", "choices": [choice]}
