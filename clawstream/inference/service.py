"""SGLang's routes over any backend: the ASGI application of the CPU engine and of the scripted one.

The event loop only moves values here; a backend never blocks it. A client that goes away cancels its request.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from clawstream.inference.dialect import (
    Call,
    GenerateBody,
    RequestRefused,
    TokenDelta,
    read_body,
    read_text,
    write_delta,
)
from clawstream.inference.http_borders import OriginGuard

PAUSE_MODES = ("abort", "retract", "in_place")


class ConnectionDropped(Exception):
    """The backend drops this connection without a last byte, as a killed engine does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What became of a command; `message` goes to the command's sender."""

    success: bool
    message: str


class Generation(Protocol):
    """One request under way."""

    async def next(self) -> TokenDelta:
        """Wait for at least one token or the finish, and return what is new; not called after a finish.

        Raises RequestRefused where only the running request shows that it can't be.
        """

    def cancel(self) -> None:
        """Stop the request and free its memory; harmless after its finish."""


class Backend(Protocol):
    """What serves the dialect. Every method returns at once or awaits; none computes on the event loop."""

    async def start(self, call: Call) -> Generation:
        """Queue the request; raises RequestRefused where it can't run."""

    def abort(self, rid: str | None) -> None:
        """Abort the request (None: every request)."""

    async def pause(self, mode: str) -> None:
        """Sample no token until `resume`."""

    async def resume(self) -> None:
        """Go on sampling."""

    async def update_weights(self, path: str, version: str | None, *, abort_all: bool) -> CommandResult:
        """Take new weights, all of them or none."""

    async def name_weights(self, version: str) -> CommandResult:
        """Call the weights that are served by this name from now on."""

    async def load_lora(self, name: str, path: str) -> CommandResult:
        """Load the adapter, which requests may then name."""

    async def unload_lora(self, name: str) -> CommandResult:
        """Unload the adapter."""

    async def flush_cache(self) -> CommandResult:
        """Empty the prefix cache, so that no later request uses it."""

    def adapters(self) -> Mapping[str, str]:
        """Loaded adapters, name to path."""

    def alive(self) -> bool:
        """Whether a request sent now would be answered."""

    def model_info(self) -> dict[str, object]:
        """The body of /model_info."""

    def server_info(self) -> dict[str, object]:
        """The body of /server_info."""


def build_app(backend: Backend) -> Starlette:
    """The dialect's routes over `backend`."""
    control = _Control(backend)
    reads = {
        "/health": control.health,
        "/ping": control.health,
        "/health_generate": control.health_generate,
        "/server_info": control.server_info,
        "/get_server_info": control.server_info,
        "/model_info": control.model_info,
        "/get_model_info": control.model_info,
        "/v1/models": control.models,
    }
    commands = {
        "/abort_request": control.abort,
        "/pause_generation": control.pause,
        "/continue_generation": control.resume,
        "/update_weights_from_disk": control.update_weights,
        "/update_weight_version": control.name_weights,
        "/load_lora_adapter": control.load_lora,
        "/unload_lora_adapter": control.unload_lora,
    }
    routes = [
        Route("/generate", _Generate(backend), methods=["POST", "PUT"]),
        *(Route(path, handler) for path, handler in reads.items()),
        Route("/flush_cache", control.flush_cache, methods=["POST"]),  # SGLang takes GET too, which any page can send
        *(Route(path, _with_body(run), methods=["POST"]) for path, run in commands.items()),
    ]
    return Starlette(routes=routes, middleware=[Middleware(OriginGuard)])


class Server(uvicorn.Server):
    """uvicorn in a process that has signal handlers of its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no handler."""
        yield


class AppServer(Server):
    """A server of the dialect's routes that ends within about a second of `should_exit`."""

    def __init__(self, app: Starlette) -> None:
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        super().__init__(config)


def answer(content: object, status: int = 200) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def refuse(message: str, status: int) -> Response:
    """SGLang's error body."""
    return answer({"error": {"message": message}}, status)


class _Generate:
    """POST /generate, raw ASGI because every token passes here."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = read_body(_json(await request.body()), new_rid=uuid.uuid4().hex)
        except RequestRefused as refused:
            await refuse(str(refused), refused.status)(scope, receive, send)
            return
        generations: list[Generation] = []
        with ExitStack() as started:  # if one call is refused, the calls started before it are cancelled
            try:
                for call in body.calls:
                    generation = await self._backend.start(call)
                    started.callback(generation.cancel)
                    generations.append(generation)
                await _answer(body, generations, scope, receive, send)
            except RequestRefused as refused:
                refusal = _stream_refusal(refused) if body.stream else refuse(str(refused), refused.status)
                await refusal(scope, receive, send)


async def _answer(
    body: GenerateBody, generations: list[Generation], scope: Scope, receive: Receive, send: Send
) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_cancel_when_gone(receive, generations))
            if body.stream:
                await _stream(body, generations, send)
            else:
                await _whole(body, generations, scope, receive, send)
            watcher.cancel()
    except* ConnectionDropped:
        pass  # the server closes a connection whose response was not completed


async def _cancel_when_gone(receive: Receive, generations: list[Generation]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    for generation in generations:
        generation.cancel()


async def _stream(body: GenerateBody, generations: list[Generation], send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def follow(index: int) -> None:
        call, generation = body.calls[index], generations[index]
        finish = None
        while finish is None:
            try:
                delta = await generation.next()
            except RequestRefused as refused:
                event = b"data: " + orjson.dumps(_refusal(refused)) + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": True})
                return
            finish = delta.finish
            element = write_delta(call, delta)
            if body.batch:
                element["index"] = index
            event = b"data: " + orjson.dumps(element) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})

    if len(generations) == 1:
        await follow(0)
    else:
        async with asyncio.TaskGroup() as group:
            for index in range(len(generations)):
                group.create_task(follow(index))
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _whole(body: GenerateBody, generations: list[Generation], scope: Scope, receive: Receive, send: Send) -> None:
    elements = []
    for call, generation in zip(body.calls, generations, strict=True):
        try:
            total = await generation.next()
            while total.finish is None:
                total.absorb(await generation.next())
        except RequestRefused as refused:
            await refuse(str(refused), refused.status)(scope, receive, send)
            return
        elements.append(write_delta(call, total))
    await answer(elements if body.batch else elements[0])(scope, receive, send)


def _refusal(refused: RequestRefused) -> dict[str, object]:
    error = {"message": str(refused), "type": "invalid_request_error", "code": refused.status, "retryable": False}
    return {"error": error}


def _stream_refusal(refused: RequestRefused) -> Response:
    content = b"data: " + orjson.dumps(_refusal(refused)) + b"\n\ndata: [DONE]\n\n"
    return Response(content, media_type="text/event-stream")


class _Control:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def health(self, _request: Request) -> Response:
        return Response(status_code=200 if self._backend.alive() else 503)

    async def health_generate(self, _request: Request) -> Response:
        if not self._backend.alive():
            return Response(status_code=503)
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        generation = await self._backend.start(read_body(body, new_rid=f"health_{uuid.uuid4().hex}").calls[0])
        try:
            async with asyncio.timeout(20):
                await generation.next()
        except TimeoutError:
            return Response(status_code=503)
        finally:
            generation.cancel()
        return Response(status_code=200)

    async def server_info(self, _request: Request) -> Response:
        return answer(self._backend.server_info())

    async def model_info(self, _request: Request) -> Response:
        return answer(self._backend.model_info())

    async def models(self, _request: Request) -> Response:
        name = str(self._backend.model_info()["model_path"])
        adapters = [{"id": key, "root": path, "parent": name} for key, path in self._backend.adapters().items()]
        limit = self._backend.server_info()["context_length"]
        base = {"id": name, "root": name, "parent": None, "max_model_len": limit}
        return answer({"object": "list", "data": [base, *adapters]})

    async def abort(self, body: dict[str, Any]) -> Response:
        everything, rid = body.get("abort_all") is True, body.get("rid")
        if everything or rid:
            self._backend.abort(None if everything else str(rid))
        return Response(status_code=200)

    async def pause(self, body: dict[str, Any]) -> Response:
        mode = body.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise RequestRefused(f"mode is {mode!r}, expected one of {', '.join(PAUSE_MODES)}")
        await self._backend.pause(mode)
        return answer({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, _body: dict[str, Any]) -> Response:
        await self._backend.resume()
        return answer({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights(self, body: dict[str, Any]) -> Response:
        version = body.get("weight_version")
        outcome = await self._backend.update_weights(
            read_text("model_path", body.get("model_path")),
            None if version is None else str(version),
            abort_all=body.get("abort_all_requests") is True,
        )
        content = {"success": outcome.success, "message": outcome.message, "num_paused_requests": 0}
        return answer(content, 200 if outcome.success else 400)

    async def name_weights(self, body: dict[str, Any]) -> Response:
        version = read_text("new_version", body.get("new_version"))
        if body.get("abort_all_requests") is not False:
            self._backend.abort(None)
        outcome = await self._backend.name_weights(version)
        return answer({"success": outcome.success, "message": outcome.message}, 200 if outcome.success else 400)

    async def load_lora(self, body: dict[str, Any]) -> Response:
        name, path = (read_text(key, body.get(key)) for key in ("lora_name", "lora_path"))
        return self._lora(await self._backend.load_lora(name, path))

    async def unload_lora(self, body: dict[str, Any]) -> Response:
        return self._lora(await self._backend.unload_lora(read_text("lora_name", body.get("lora_name"))))

    async def flush_cache(self, _request: Request) -> Response:
        outcome = await self._backend.flush_cache()
        return Response(outcome.message + "\n", status_code=200 if outcome.success else 400)

    def _lora(self, outcome: CommandResult) -> Response:
        content: dict[str, object] = {"success": outcome.success, "loaded_adapters": dict(self._backend.adapters())}
        if not outcome.success:
            content["error_message"] = outcome.message
        return answer(content, 200 if outcome.success else 400)


def _with_body(run: Callable[[dict[str, Any]], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of requests whose body is a JSON object; no body counts as an empty object."""

    async def handle(request: Request) -> Response:
        try:
            return await run(_object(_json(await request.body() or b"{}")))
        except RequestRefused as refused:
            return refuse(str(refused), refused.status)

    return handle


def _json(raw: bytes) -> object:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not JSON ({error}); send a JSON object") from error


def _object(body: object) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise RequestRefused(f"the body is a {type(body).__name__}, expected a JSON object")
    return body
