"""The engine and the judges under test's parts, in the rig's own process: real HTTP, answers from a function.

No two answers of the engine are alike, so an echo proves which answer a client had. The judges' opinions follow from
the prompt alone; whether they sleep, refuse or babble is the rig's to say.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

import orjson
from aiohttp import web

from clawstream.local.servers.server_process import HOST
from clawstream.rendering.renderer import PromptRenderer
from tests.fakes.scripted_engine import ScriptedAnswer, ScriptedBackend

_TOKEN_S = 0.002
_SLEEP_S = 4.0
_SHARE = 0.5  # of the calls that a mood takes


class Mood(StrEnum):
    """How the judges are."""

    SOUND = "sound"
    ASLEEP = "asleep"
    BUSY = "busy"
    BABBLING = "babbling"


def engine(renderer: PromptRenderer, *, context_length_tokens: int) -> ScriptedBackend:
    """Return an engine that numbers its answers."""
    numbers = count(1)

    def script(_prompt: Sequence[int]) -> ScriptedAnswer:
        return ScriptedAnswer(token_ids=(*renderer.encode(f"Answer {next(numbers)}."), renderer.stop_token_ids[0]))

    return ScriptedBackend(
        script=script,
        decode=renderer.decode,
        eos_token_ids=frozenset(renderer.stop_token_ids),
        context_length_tokens=context_length_tokens,
        token_delay_s=_TOKEN_S,
        version="0",
    )


@dataclass(slots=True)
class Judges:
    """One address with judges behind it; `mood` is how they are now."""

    mood: Mood = Mood.SOUND
    num_asked: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        """For `judge.url`."""
        return f"http://{HOST}:{self.port}/v1"

    @asynccontextmanager
    async def serving(self) -> "AsyncIterator[Judges]":
        """Answer for the length of the block."""
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, HOST, 0)
            await site.start()
            self.port = runner.addresses[0][1]
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        raw = await request.read()
        body = orjson.loads(raw)
        if self.mood is not Mood.SOUND and drawn("mood", raw.decode(), self.num_asked) < _SHARE:
            if self.mood is Mood.BUSY:
                return web.json_response({"error": {"message": "busy"}}, status=429, headers={"Retry-After": "1"})
            if self.mood is Mood.BABBLING:
                return web.Response(body=hashlib.sha256(raw).digest() * 8, content_type="application/json")
            await asyncio.sleep(_SLEEP_S)
        system, prompt = (message["content"] for message in body["messages"])
        said = opinion(system, prompt)
        # Twice: what a judge says again in the same reply is said once.
        choice = {"index": 0, "message": {"role": "assistant", "content": f"{said}\n{said}"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice, choice]})


def opinion(system: str, prompt: str) -> str:
    """Return what a judge says: mostly good or bad, now and then with a hint, sometimes nothing to train on."""
    share = drawn("opinion", prompt)
    if "[HINT_START]" not in system:
        return f"\\boxed{{{1 if share < 0.5 else -1 if share < 0.9 else 0}}}"
    if share < 0.25:
        return "\\boxed{1} [HINT_START]Say the number in words, please.[HINT_END]"
    return "\\boxed{-1}"


def drawn(*parts: object) -> float:
    """Return a number from 0 up to 1 that follows from `parts`."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:7]) / 2**56
