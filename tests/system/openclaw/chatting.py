"""A person at a real OpenClaw's own gateway, over its WebSocket: says things, sees answers come, interrupts them."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from clawstream.errors import ClawstreamError

Json = dict[str, Any]
WITHIN_S = 120.0
_HELLO: Json = {
    "minProtocol": 3,
    "maxProtocol": 9,
    "client": {"id": "gateway-client", "version": "1", "platform": "linux", "mode": "backend"},
    "role": "operator",
    "scopes": ["operator.read", "operator.write", "operator.admin"],
    "caps": [],
}
_OVER = {"final", "aborted", "error"}


class Refused(ClawstreamError):
    """OpenClaw refused what it was asked, perhaps only for now."""

    def __init__(self, method: str, error: Json) -> None:
        super().__init__(f"{method}: {error}")
        self.is_for_now = error.get("retryable") is True


@dataclass(slots=True)
class Chat:
    """A connection, and what came over it."""

    socket: aiohttp.ClientWebSocketResponse
    _answers: dict[str, "asyncio.Future[Json]"] = field(default_factory=dict)
    _states: dict[str, list[str]] = field(default_factory=dict)  # by run
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def read(self) -> None:
        """Take in what comes; returns when the connection is closed."""
        async for message in self.socket:
            told: Json = message.json()
            payload = told.get("payload") or {}
            if told["type"] == "res":
                self._answers.pop(told["id"]).set_result(told)
            elif told["event"] == "chat":
                async with self._news:
                    self._states.setdefault(payload["runId"], []).append(payload["state"])
                    self._news.notify_all()

    async def call(self, method: str, **params: Any) -> Json:
        """Call a method of OpenClaw's gateway; return what it answers. Raises Refused."""
        number = str(uuid.uuid4())
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"type": "req", "id": number, "method": method, "params": params})
        async with asyncio.timeout(WITHIN_S):
            told: Json = await answer
        if not told["ok"]:
            raise Refused(method, told["error"])
        found: Json = told["payload"]
        return found

    async def send(self, session: str, text: str) -> str:
        """Say something in a session; return the run that it began, by the name that the person's end gave it."""
        run = str(uuid.uuid4())
        await self.call("chat.send", sessionKey=f"agent:main:{session}", message=text, idempotencyKey=run)
        return run

    async def abort(self, session: str, run: str) -> None:
        """Press the button that stops an answer."""
        await self.call("chat.abort", sessionKey=f"agent:main:{session}", runId=run)

    async def over(self, run: str) -> None:
        """Return once the run has ended, or was aborted."""
        await self._saw(run, _OVER)

    async def speaking(self, run: str) -> None:
        """Return once a part of the run's answer was shown."""
        await self._saw(run, {"delta"})

    async def _saw(self, run: str, states: set[str]) -> None:
        async with asyncio.timeout(WITHIN_S), self._news:
            await self._news.wait_for(lambda: not states.isdisjoint(self._states.get(run, ())))


@asynccontextmanager
async def chatting(port: int) -> AsyncIterator[Chat]:
    """A connection for the length of the block, from when OpenClaw is ready for one."""
    async with aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        async with asyncio.timeout(WITHIN_S):
            while (chat := await _welcomed(http, port, stack)) is None:
                await asyncio.sleep(0.2)
        yield chat


async def _welcomed(http: aiohttp.ClientSession, port: int, stack: AsyncExitStack) -> Chat | None:
    """A connection that ends with the stack; None while OpenClaw says that it is starting."""
    async with AsyncExitStack() as own:
        chat = Chat(await own.enter_async_context(http.ws_connect(f"http://127.0.0.1:{port}/")))
        reading = asyncio.create_task(chat.read())
        own.push_async_callback(_ended, chat, reading)
        try:
            await chat.call("connect", **_HELLO)
        except Refused as refused:
            if not refused.is_for_now:
                raise
            return None
        await stack.enter_async_context(own.pop_all())
        return chat


async def _ended(chat: Chat, reading: "asyncio.Task[None]") -> None:
    await chat.socket.close()
    await reading
