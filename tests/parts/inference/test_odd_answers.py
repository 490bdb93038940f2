"""An engine or a teacher that answers what none can have computed, too much of it, for too long, or from elsewhere."""

import asyncio
import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from clawstream.config import EngineSettings
from clawstream.errors import TryLater
from clawstream.inference.clients import engine_session
from clawstream.inference.engine import Chunk, EngineRefused, GenerateRequest, SamplingParams
from clawstream.inference.sglang import SglangEngine
from tests.rogue import Rogue, drip, head, piece, pour, rogue

REQUEST = GenerateRequest(input_ids=[1, 2, 3], sampling=SamplingParams(max_new_tokens=8, stop=("end",)))
STREAM_LIMIT = 64 * 2**10 + 8 * 4096
STOP = {"type": "stop", "matched": None}


def event(token_ids: object, **meta: Any) -> bytes:
    """One event of a stream, with its log-probs."""
    pairs = [[-0.5, token, None] for token in token_ids] if isinstance(token_ids, list) else None
    whole = {"finish_reason": None, "output_token_logprobs": pairs, "weight_version": "3"} | meta
    return b"data: " + json.dumps({"output_ids": token_ids, "meta_info": whole}).encode() + b"\n\n"


async def answered(url: str, *, silence_s: float = 5.0, num_token_ids: int | None = None) -> list[Chunk]:
    async with engine_session(EngineSettings()) as session:
        engine = SglangEngine(session, url, silence_s=silence_s, control_s=5, num_token_ids=num_token_ids)
        return [chunk async for chunk in engine.generate(REQUEST)]


async def said(*events: bytes, num_token_ids: int | None = None) -> list[Chunk]:
    async def say(_: Rogue, writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, "Content-Type: text/event-stream") + piece(b"".join(events)) + b"0\r\n\r\n")

    async with rogue(say) as engine:
        return await answered(engine.url, num_token_ids=num_token_ids)


def spans(*found: tuple[object, object, object]) -> list[dict[str, object]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in found]


async def test_an_answer_within_its_bounds_is_passed_on() -> None:
    last = event([7, 8], finish_reason=STOP, weight_versions=spans(("3", 0, 1), ("4", 1, 3)), completion_tokens=3)
    chunks = await said(event([9], completion_tokens=1, prompt_tokens=3, cached_tokens=2), last, num_token_ids=10)
    assert [token for chunk in chunks for token in chunk.token_ids] == [9, 7, 8]
    assert [(span.version, span.num_tokens) for span in chunks[-1].weight_versions] == [("3", 1), ("4", 2)]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([event(["7"])], "token id is '7'"),
        ([event([10**12])], "token id is 1000000000000"),
        ([event([10])], "token id is 10, expected an integer from 0 to 9"),
        ([event([-1])], "token id is -1"),
        ([event([7.0])], "token id is 7.0"),
        ([event([True])], "token id is True"),
        ([event("78", output_token_logprobs=[[-1, 7], [-1, 8]])], "token id is '7'"),
        ([event([7], output_token_logprobs=[[5.0, 7, None]])], "log-prob is 5.0"),
        ([event([7], output_token_logprobs=[["-0.5", 7, None]])], "log-prob is '-0.5'"),
        ([event([7], output_token_logprobs=[[float("nan"), 7, None]])], "not SGLang's dialect"),
        ([event([7], output_token_logprobs=[[-1e300, 7, None]])], "log-prob is -1e"),
        ([event([7], output_token_logprobs=[[]])], "not SGLang's dialect"),
        ([event([7] * 500)], "500 tokens, expected at most the 8"),
        ([event([7] * 5), event([7] * 5)], "10 tokens, expected at most the 8"),
        ([event([7], completion_tokens="1")], "completion_tokens is 1, expected an integer"),
        ([event([7], cached_tokens=10**12)], "cached_tokens is 1000000000000"),
        ([event([7], prompt_tokens=4)], "prompt_tokens is 4"),
        ([event([7], weight_version={"a": 1})], "weight_version is"),
        ([event([7], weight_version="9" * 10_000)], "weight_version is"),
        ([event([7], finish_reason=STOP, weight_versions=spans(("3", 0, 10), ("4", 10, 1)))], "weight_versions hold"),
        ([event([7], finish_reason=STOP, weight_versions=spans(("3", 1, 2)))], "weight_versions hold"),
        ([event([7], finish_reason=STOP, weight_versions=spans(("3", 0, "1")))], "weight_versions hold"),
        ([event([7], finish_reason=STOP, weight_versions="33")], "not SGLang's dialect"),
        ([event([7], finish_reason="stop")], "not SGLang's dialect"),
        ([event([7], finish_reason={"type": "stop", "matched": "other"})], "matched stop is 'other'"),
        ([event([7], finish_reason={"type": "stop", "matched": [1]})], "matched stop is"),
        ([b'data: {"output_ids": [7], "meta_info": [1]}\n\n'], "not SGLang's dialect"),
        ([b"data: [7]\n\n"], "not SGLang's dialect"),
        ([b"data: " + b"[" * 50_000 + b"\n\n"], "not SGLang's dialect"),
        ([b'data: {"error": {"code": 1000000000000, "message": "m"}}\n\n'], "status 1000000000000, m"),
        ([b'data: {"error": {"code": 307, "message": "m"}}\n\n'], "status 307, m"),
    ],
)
async def test_an_answer_that_no_engine_gives_is_an_error_that_says_what_was_found(
    events: Sequence[bytes], why: str
) -> None:
    with pytest.raises(TryLater) as caught:
        await said(*events, num_token_ids=10)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("data", [b"\n\n", b"x" * 1000, event([], completion_tokens=0)])
async def test_a_stream_that_goes_on_without_tokens_ends_at_its_limit_and_is_not_held(data: bytes) -> None:
    async def say(found: Rogue, writer: asyncio.StreamWriter) -> None:
        writer.write(head())
        await pour(found, writer, data * (2**16 // len(data)), 1600)

    async with rogue(say) as engine:
        tracemalloc.start()
        try:
            with pytest.raises(TryLater, match=f"expected at most {STREAM_LIMIT}"):
                await answered(engine.url)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert engine.sent_bytes < 20 * 2**20
    assert peak_bytes < 8 * 2**20


async def test_a_stream_that_drips_without_tokens_ends_once_its_silence_is_too_long() -> None:
    async def say(_: Rogue, writer: asyncio.StreamWriter) -> None:
        writer.write(head() + piece(event([7])))
        await drip(writer, event([]), 0.02)

    async with rogue(say) as engine:
        with pytest.raises(TryLater, match=r"no token within 0\.3 s"):
            await answered(engine.url, silence_s=0.3)


async def test_an_engine_that_goes_on_after_the_end_of_an_answer_keeps_nobody_waiting() -> None:
    async def say(found: Rogue, writer: asyncio.StreamWriter) -> None:
        writer.write(head() + piece(event([7], finish_reason=STOP, weight_versions=spans(("3", 0, 1)))))
        await pour(found, writer, b"x" * 2**16, 1600)

    async with rogue(say) as engine:
        async with asyncio.timeout(5):
            (chunk,) = await answered(engine.url)
        assert chunk.token_ids == (7,)
        assert engine.sent_bytes < 20 * 2**20


@pytest.mark.parametrize("status", [301, 307, 308])
async def test_an_engine_does_not_send_the_prompt_elsewhere(status: int) -> None:
    async def elsewhere(_: Rogue, writer: asyncio.StreamWriter) -> None:
        writer.write(head() + piece(event([7], finish_reason=STOP)) + b"0\r\n\r\n")

    async with rogue(elsewhere) as other:

        async def say(_: Rogue, writer: asyncio.StreamWriter) -> None:
            writer.write(head(status, f"Location: {other.url}/generate") + b"0\r\n\r\n")

        async with rogue(say) as engine:
            with pytest.raises(TryLater, match="redirects are not followed"):
                await answered(engine.url)
    assert other.heads == []


async def test_what_an_engine_says_of_a_refusal_is_cut() -> None:
    async def say(found: Rogue, writer: asyncio.StreamWriter) -> None:
        writer.write(head(400))
        await pour(found, writer, b"no " * 2**18, 100)

    async with rogue(say) as engine:
        with pytest.raises(EngineRefused) as caught:
            await answered(engine.url)
        assert engine.sent_bytes < 20 * 2**20
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([[None, 1], [5.0, 9], [-0.25, 3]], "log-prob is 5.0"),
        ([[None, 1], ["-1", 9], [-0.25, 3]], "log-prob is '-1'"),
        ([[None, 1], [-1, 9], [-1e300, 3]], "log-prob is -1e"),
        ("abc", "input_token_logprobs"),
        ([[None, 1], [-1, [9]], [-1, 3]], "([9], -1)"),
        ([[-0.5, 1]] * 8000, "its answer is not read, it has more than 66304 bytes"),
    ],
)
async def test_a_teachers_score_that_no_model_gives_is_not_used(entries: object, why: str) -> None:
    async def say(_: Rogue, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"meta_info": {"input_token_logprobs": entries}}).encode()
        writer.write(head() + piece(body) + b"0\r\n\r\n")

    async with rogue(say) as teacher, engine_session(EngineSettings()) as session:
        with pytest.raises(TryLater) as caught:
            await SglangEngine(session, teacher.url, control_s=5).score([1, 9, 3], 1)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"/model_info": {"model_path": "m", "weight_version": "9" * 5000}}, "weight_version is"),
        ({"/model_info": {"model_path": "m", "weight_version": 7}}, "weight_version is"),
        ({"/model_info": {"model_path": ["m"]}}, "model_path is"),
        ({"/v1/models": {"data": [{"max_model_len": "64"}]}}, "max_model_len '64'"),
        ({"/v1/models": {"data": [{"max_model_len": 10**12}]}}, "max_model_len 1000000000000"),
        ({"/v1/models": {"data": "x" * 5 * 2**20}}, "its answer is not read"),
    ],
)
async def test_an_engine_that_says_nothing_usable_of_itself_is_away(answers: dict[str, object], why: str) -> None:
    told = {"/model_info": {"model_path": "m"}, "/v1/models": {"data": [{"max_model_len": 64}]}} | answers

    async def say(found: Rogue, writer: asyncio.StreamWriter) -> None:
        path = found.heads[-1].split()[1].decode()
        writer.write(head() + piece(json.dumps(told[path]).encode()) + b"0\r\n\r\n")

    async with rogue(say) as engine, engine_session(EngineSettings()) as session:
        with pytest.raises(TryLater) as caught:
            await SglangEngine(session, engine.url, control_s=5).server_info()
    assert why in str(caught.value)
    assert len(str(caught.value)) < 600


async def test_an_engines_cookies_are_not_kept() -> None:
    async def say(_: Rogue, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"model_path": "m", "weight_version": "1"}).encode()
        writer.write(head(200, "Set-Cookie: a=b") + piece(body) + b"0\r\n\r\n")

    async with rogue(say) as engine, engine_session(EngineSettings()) as session:
        for _ in range(2):
            await SglangEngine(session, engine.url).weight_version()
        assert not any(b"Cookie" in one for one in engine.heads)
