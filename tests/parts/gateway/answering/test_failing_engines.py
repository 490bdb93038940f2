"""What the gateway promises when an engine fails, is silent or is not there."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from clawstream.events import (
    ExchangeFailed,
    FailureReason,
)
from clawstream.gateway.http.connection import Bounds
from tests.fakes.scripted_engine import Fault
from tests.parts.gateway.running_gateway import (
    QUESTION,
    WITHIN_S,
    RunningGateway,
    running_gateway,
    until,
)

BODY = json.dumps({"model": "policy", "messages": QUESTION, "stream": True}).encode()


@pytest.fixture
async def gateway(tokenizer_folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer_folder) as found:
        yield found


async def test_an_engine_that_dies_in_mid_answer_is_an_error_in_the_stream(gateway: RunningGateway) -> None:
    gateway.engine.faults.append(Fault(cut_after_tokens=3))
    response = await gateway.chat(stream=True)
    (failed,) = await gateway.recorded(ExchangeFailed)
    assert response.text == "It"
    assert "engine failed" in response.events[-1]["error"]["message"]
    assert (response.finish_reasons, response.done) == ([], False)
    assert (failed.reason, len(failed.output_ids)) == (FailureReason.ENGINE_FAILED, 3)
    assert not failed.is_interrupted


@pytest.mark.slow
@pytest.mark.parametrize(("status", "expected"), [(400, 400), (422, 422), (503, 503), (500, 503)])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_refuses_gives_its_own_status(
    gateway: RunningGateway, status: int, expected: int, stream: bool
) -> None:
    gateway.engine.faults.append(Fault(status=status, message="no such thing"))
    response = await gateway.chat(stream=stream)
    (failed,) = await gateway.recorded(ExchangeFailed)
    assert response.status == expected
    assert "no such thing" in response.body["error"]["message"]
    assert failed.reason in (FailureReason.ENGINE_REFUSED, FailureReason.ENGINE_FAILED)


async def test_an_aborted_answer_is_no_answer(gateway: RunningGateway) -> None:
    gateway.engine.hold()
    asking = asyncio.create_task(gateway.chat())
    await until(gateway.generating)
    gateway.engine.abort(None)
    assert (await asking).status == 503
    assert (await gateway.recorded(ExchangeFailed))[0].reason is FailureReason.ENGINE_FAILED


async def test_an_engine_that_says_nothing_is_given_up_in_time(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, bounds=Bounds(first_token_timeout_s=0.1)) as gateway:
        gateway.engine.hold()
        response = await gateway.chat()
        (failed,) = await gateway.recorded(ExchangeFailed)
        gateway.engine.release()
    assert response.status == 503
    assert failed.reason is FailureReason.TIMED_OUT
    assert gateway.engine.cancelled == [failed.exchange_id]


async def test_an_engine_that_is_down_is_a_503_that_says_when_to_try_again(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, engine_urls=("http://127.0.0.1:9",)) as gateway:
        response = await gateway.chat()
        ready, missing = await gateway.get("/readyz")
        alive, _ = await gateway.get("/healthz")
    assert (response.status, response.headers["retry-after"]) == (503, "2")
    assert "127.0.0.1:9" in response.body["error"]["message"]
    assert (ready, json.loads(missing)["missing"][0]["part"], alive) == (503, "engine http://127.0.0.1:9", 200)


async def test_a_silent_stream_is_kept_alive(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, bounds=Bounds(heartbeat_s=0.02)) as gateway:
        gateway.engine.hold()
        async with gateway.asking(BODY) as answer, asyncio.timeout(WITHIN_S):
            assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            gateway.engine.release()
            rest = await answer.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_an_error_after_a_comment_is_told_in_the_stream(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, bounds=Bounds(heartbeat_s=0.02)) as gateway:
        gateway.engine.hold()
        async with gateway.asking(BODY) as answer, asyncio.timeout(WITHIN_S):
            await answer.content.readuntil(b"\n\n")
            gateway.engine.abort(None)
            rest = await answer.content.read()
    assert b'"error":' in rest
