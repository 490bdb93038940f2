"""Simulates a judge model: an OpenAI-compatible service that is wrong in a stated share of its votes.

The one rule: it knows a request's messages and seed, and nothing about the policy, the student or the sums.
Run as `python -m clawstream.simulation.judge --port N`; the first line on stdout is {"url": ...} once it listens.
"""

import asyncio
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import orjson
import typer
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from clawstream.inference.http_borders import OriginGuard
from clawstream.simulation.everyday.listener import LISTENERS
from clawstream.simulation.opinions import HABITS, Control, Listener, Replies, SimulatedJudge, StepJudge, controlled

MODEL = "simulated-judge"
STEPS = "tools"  # the scenario in which agents' steps are judged, not what people say
_PEOPLE: Mapping[str, Listener] = MappingProxyType({**HABITS, **LISTENERS})  # by scenario


class UnusableRequest(ValueError):
    """The body is not a chat completion request that this judge can answer."""


class Service:
    """The routes, and how often each prompt has come without a seed of its own."""

    def __init__(self, judge: Replies, latency_ms: float) -> None:
        self._judge = judge
        self._latency_ms = latency_ms
        self._asked: Counter[str] = Counter()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
            ],
            middleware=[Middleware(OriginGuard)],
        )

    async def health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok", "simulated": True})

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "clawstream"}]})

    async def complete(self, request: Request) -> Response:
        try:
            body = parse(await request.body())
            system, prompt = _by_role(body, "system"), _by_role(body, "user")
            seed = self._seed(body, system + prompt)
        except UnusableRequest as error:
            message = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
            return JSONResponse({"error": message}, 400)
        if self._latency_ms:
            await asyncio.sleep(self._latency_ms / 1000)
        return JSONResponse(completion(prompt, self._judge.reply(system, prompt, seed)))

    def _seed(self, body: dict[str, object], prompt: str) -> int:
        """The vote's own seed; without one, repeats of a prompt are told apart by their number."""
        seed = body.get("seed")
        if isinstance(seed, int):
            return seed
        self._asked[prompt] += 1
        return -self._asked[prompt]


def parse(raw: bytes) -> dict[str, object]:
    """Return the request; raises UnusableRequest."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise UnusableRequest(f"the body is not JSON: {error}; send a chat completion request") from error
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise UnusableRequest("messages is missing or empty; send at least one user message")
    if body.get("stream"):
        raise UnusableRequest("stream is true; this judge answers whole, so leave it out")
    return body


def completion(prompt: str, text: str) -> dict[str, object]:
    """Return the reply in OpenAI's shape; tokens are counted as four characters each."""
    asked, answered = len(prompt) // 4, len(text) // 4
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered},
    }


def _by_role(body: dict[str, object], role: str) -> str:
    messages = body["messages"]
    assert isinstance(messages, list)
    said: list[Any] = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == role]
    if not all(isinstance(content, str) for content in said):
        raise UnusableRequest(f"the content of a {role} message is not a string; send plain text")
    return "\n".join(said)


def main(
    port: Annotated[int, typer.Option(help="0: any free one", min=0, max=65535)] = 0,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    wrong_share: Annotated[float, typer.Option(help="share of votes that are wrong", min=0, max=1)] = 0.1,
    together_share: Annotated[
        float, typer.Option(help="share of turns on which all votes are wrong, or none", min=0, max=1)
    ] = 0.0,
    wordy_share: Annotated[float, typer.Option(help="share of hints that are wordy", min=0, max=1)] = 0.0,
    seed: Annotated[int, typer.Option(help="of the wrong votes")] = 0,
    latency_ms: Annotated[float, typer.Option(help="before each reply", min=0)] = 0.0,
    scenario: Annotated[str, typer.Option(help=f"whose people it reads: {', '.join((*_PEOPLE, STEPS))}")] = "student",
    control: Annotated[Control | None, typer.Option(help="answer something else than the prompt's reaction")] = None,
) -> None:
    """Serve the simulated judge until a signal comes."""
    if scenario not in (*_PEOPLE, STEPS):
        print(
            f"scenario {scenario!r}: expected one of {', '.join((*_PEOPLE, STEPS))}. Nothing is served.",
            file=sys.stderr,
        )
        raise typer.Exit(2)
    judge: Replies = (
        StepJudge(wrong_share=wrong_share, seed=seed)
        if scenario == STEPS
        else SimulatedJudge(
            wrong_share=wrong_share, seed=seed, listener=_PEOPLE[scenario], together_share=together_share,
            wordy_share=wordy_share,
        )
    )  # fmt: skip
    app = Service(controlled(judge, control, seed=seed), latency_ms).app()
    listening = socket.create_server((host, port))
    print(orjson.dumps({"url": f"http://{host}:{listening.getsockname()[1]}/v1"}).decode(), flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    typer.run(main)
