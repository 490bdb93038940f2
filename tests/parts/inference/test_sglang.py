"""The client against an engine that misbehaves, and the scripted engine's own promises."""

import asyncio
import json
import re
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler
from pydantic import SecretStr

from clawstream.config import EngineSettings
from clawstream.errors import TryLater
from clawstream.inference.clients import engine_session
from clawstream.inference.engine import EngineRefused, GenerateRequest, SamplingParams
from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.server_process import reserved
from tests.fakes.scripted_engine import Fault, ScriptedAnswer, ScriptedBackend, counting, serving

REQUEST = GenerateRequest(input_ids=[1, 2, 3], sampling=SamplingParams(max_new_tokens=8))


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(script=counting(8))


@pytest.fixture
async def engine(backend: ScriptedBackend) -> AsyncIterator[SglangEngine]:
    async with serving(backend) as url, aiohttp.ClientSession() as session:
        yield SglangEngine(session, url, silence_s=1, control_s=5)


async def tokens(engine: SglangEngine, request: GenerateRequest = REQUEST) -> list[int]:
    return [token async for chunk in engine.generate(request) for token in chunk.token_ids]


async def test_script_is_said_word_for_word(engine: SglangEngine, backend: ScriptedBackend) -> None:
    backend.script = lambda ids: ScriptedAnswer(token_ids=tuple(reversed(ids)), logprobs_nats=(-0.5, -0.25, -0.125))
    chunks = [chunk async for chunk in engine.generate(REQUEST)]
    assert [token for chunk in chunks for token in chunk.token_ids] == [3, 2, 1]
    assert [value for chunk in chunks for value in chunk.logprobs_nats] == [-0.5, -0.25, -0.125]


async def test_connection_cut_in_the_stream_is_for_later(engine: SglangEngine, backend: ScriptedBackend) -> None:
    backend.faults.append(Fault(cut_after_tokens=3))
    heard: list[int] = []

    async def listen() -> None:
        async for chunk in engine.generate(REQUEST):
            heard.extend(chunk.token_ids)

    with pytest.raises(TryLater):
        await listen()
    assert heard == [10, 11, 12]
    assert await tokens(engine) == list(range(10, 18))


async def test_a_request_on_a_connection_that_the_engine_just_closed_is_sent_again_once() -> None:
    """As a busy process does that is late to hear of the close: no request is refused for it."""
    asked: list[int] = []
    body = b'{"data": []}'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers = 1  # then the connection ends without an answer, whatever is asked
        while await reader.readuntil(b"{}"):
            asked.append(answers)
            if not answers or len(asked) > 3:
                break
            answers = 0
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, aiohttp.ClientSession() as session:
        engine = SglangEngine(session, f"http://127.0.0.1:{port}", control_s=5)
        assert await engine._post("/any", {}) == {"data": []}
        assert await engine._post("/any", {}) == {"data": []}
        assert asked == [1, 0, 1], "the second was sent again, on a connection of its own"
        with pytest.raises(TryLater, match="Server disconnected"):
            await engine._post("/any", {})
        assert asked == [1, 0, 1, 0, 1], "and no third time"


async def test_a_request_that_is_cut_while_it_is_written_is_sent_again_once() -> None:
    """A long body's way of hearing of the close; uvloop's for a short one too."""
    num_asked = 0

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        await reader.read(1)
        writer.transport.abort()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, aiohttp.ClientSession() as session:
        with pytest.raises(TryLater, match=r"Broken pipe|reset|Can not write"):
            await SglangEngine(session, f"http://127.0.0.1:{port}")._post("/any", {"text": "x" * 900_000})
    assert num_asked == 2


async def test_where_nobody_listens_a_request_is_not_sent_again() -> None:
    num_sent = 0

    async def count(*_: object) -> None:
        nonlocal num_sent
        num_sent += 1

    sent = aiohttp.TraceConfig()
    sent.on_request_start.append(count)
    with reserved() as port:
        pass
    async with aiohttp.ClientSession(trace_configs=[sent]) as session:
        with pytest.raises(TryLater, match="no answer"):
            await SglangEngine(session, f"http://127.0.0.1:{port}")._post("/any", {})
    assert num_sent == 1


@pytest.mark.parametrize(
    ("status", "error"), [(400, EngineRefused), (503, TryLater), (429, TryLater), (401, TryLater), (404, TryLater)]
)
async def test_refusal_by_status_is_final_or_for_later(
    engine: SglangEngine, backend: ScriptedBackend, status: int, error: type[Exception]
) -> None:
    backend.faults.extend([Fault(status=status, message="because"), Fault(status=status, message="because")])
    with pytest.raises(error, match="because"):
        await tokens(engine)
    with pytest.raises(error, match="because"):
        await engine.score([1, 2, 3], 1)


async def test_every_request_shows_the_engines_key_and_a_wrong_one_is_named_with_its_setting() -> None:
    @web.middleware
    async def keyed(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer the-key":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def generate(_request: web.Request) -> web.Response:
        meta = {"weight_version": "0", "finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 7, None]]}
        element = json.dumps({"output_ids": [7], "meta_info": {"id": "1", "completion_tokens": 1, **meta}})
        return web.Response(text=f"data: {element}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    app = web.Application(middlewares=[keyed])
    app.router.add_post("/generate", generate)
    async with TestServer(app) as server:
        url = str(server.make_url(""))
        async with engine_session(EngineSettings(api_key=SecretStr("the-key"))) as session:
            assert await tokens(SglangEngine(session, url)) == [7]
        for settings in (EngineSettings(), EngineSettings(api_key=SecretStr("another"))):
            async with engine_session(settings) as session:
                with pytest.raises(TryLater, match=r"401, Unauthorized.*engine\.api_key"):
                    await tokens(SglangEngine(session, url))


async def test_weights_and_adapters_may_take_as_long_as_they_load_and_no_other_question() -> None:
    async def slowly(_request: web.Request) -> web.Response:
        await asyncio.sleep(0.2)
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path}", slowly)
    async with TestServer(app) as server, engine_session(EngineSettings()) as session:
        url = str(server.make_url(""))
        patient = SglangEngine(session, url, control_s=0.05, load_s=30)
        await patient.update_weights("folder", "1")
        await patient.load_lora_adapter("tuned", "folder")
        await patient.unload_lora_adapter("tuned")
        with pytest.raises(TryLater, match="no answer"):
            await patient.pause()
        with pytest.raises(TryLater, match="no answer"):
            await SglangEngine(session, url, load_s=0.1).update_weights("folder", "1")


async def test_an_engine_that_repeats_the_answer_in_each_chunk_is_told_which_flag_it_lacks() -> None:
    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for so_far in ([7], [7, 8], [7, 8, 9]):
            pairs = [[-0.5, token, None] for token in so_far]
            meta = {"finish_reason": None, "completion_tokens": len(so_far), "output_token_logprobs": pairs}
            await response.write(b"data: " + json.dumps({"output_ids": so_far, "meta_info": meta}).encode() + b"\n\n")
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    async with TestServer(app) as server, engine_session(EngineSettings()) as session:
        with pytest.raises(TryLater, match="--incremental-streaming-output"):
            await tokens(SglangEngine(session, str(server.make_url(""))))


@pytest.mark.parametrize(
    ("entries", "wrong"),
    [
        ([[None, 1], [-0.5, 9], [-0.25, 3]], None),
        ([[None, 1], [-0.5, 0], [-0.25, 3]], None),  # the vocabulary's last row, as SGLang names it
        ([[None, 1], [-0.5, 9], [-0.25, 0]], "(0, -0.25)"),
        ([[None, 9], [-0.5, 3], [-0.25, 9]], "(3, -0.5)"),
        ([[None, 1], [-0.5, 9], [None, 3]], "(3, None)"),
        ([[None, 1], [-0.5, 9]], "scores for 1 tokens"),
        ([[None, 1], [-0.5, 9], [-0.25, 3], [-0.1, 4]], "scores for 3 tokens"),
    ],
)
async def test_scores_of_other_tokens_than_asked_for_are_not_used(entries: list[object], wrong: str | None) -> None:
    async def generate(_request: web.Request) -> web.Response:
        return web.json_response({"meta_info": {"input_token_logprobs": entries}})

    app = web.Application()
    app.router.add_post("/generate", generate)
    async with TestServer(app) as server, engine_session(EngineSettings()) as session:
        engine = SglangEngine(session, str(server.make_url("")))
        if wrong is None:
            assert await engine.score([1, 9, 3], 1) == (-0.5, -0.25)
        else:
            with pytest.raises(TryLater, match=re.escape(wrong)):
                await engine.score([1, 9, 3], 1)


async def test_silence_beyond_the_limit_is_for_later(engine: SglangEngine, backend: ScriptedBackend) -> None:
    backend.hold()
    with pytest.raises(TryLater, match="no answer"):
        await tokens(engine)


async def test_request_reaches_the_engine_as_it_was_asked(engine: SglangEngine, backend: ScriptedBackend) -> None:
    sampling = SamplingParams(
        max_new_tokens=2, temperature=0.7, top_p=0.9, top_k=5, sampling_seed=3, stop_token_ids=(9,)
    )
    request = GenerateRequest(input_ids=[5, 6], sampling=sampling, extra_key="41", rid="mine")
    await tokens(engine, request)
    assert backend.calls[-1].request == request


async def test_hundred_requests_share_few_connections(backend: ScriptedBackend) -> None:
    connector = aiohttp.TCPConnector(limit=2)
    async with serving(backend) as url, aiohttp.ClientSession(connector=connector) as session:
        engine = SglangEngine(session, url)
        opened = 0
        create = connector._create_connection

        async def counted(*arguments: object, **named: object) -> object:
            nonlocal opened
            opened += 1
            return await create(*arguments, **named)  # type: ignore[arg-type]

        connector._create_connection = counted  # type: ignore[method-assign, assignment]
        for _ in range(100):
            assert len(await tokens(engine)) == 8
    assert opened == 1
