"""Too much of everything: what is refused, that nothing is held of it, and that others are answered meanwhile."""

import asyncio
import gc
import gzip
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from clawstream.gateway.http.connection import Bounds
from clawstream.gateway.requests import body
from tests.parts.gateway.running_gateway import QUESTION, Response, RunningGateway, read, running_gateway
from tests.parts.hostile.raw import post, question, wire

MIB = 2**20
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
IN_CHUNKS = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
async def gateway(tokenizer_folder: Path) -> AsyncIterator[RunningGateway]:
    """A gateway that is not held up by looks at other tests' objects: its own process puts those of its start aside."""
    gc.collect()
    gc.freeze()
    try:
        async with running_gateway(tokenizer_folder) as found:
            yield found
    finally:
        gc.unfreeze()


def asking(**fields: object) -> bytes:
    return json.dumps({"model": "policy", "messages": QUESTION} | fields).encode()


def nested(levels: int) -> bytes:
    return asking(note="HERE").replace(b'"HERE"', b"[" * levels + b"]" * levels)


def with_number(number: bytes) -> bytes:
    return asking(note="HERE").replace(b'"HERE"', number)


def listed(value: bytes, times: int) -> bytes:
    return b"[" + b",".join([value] * times) + b"]"


BODIES: dict[str, tuple[Callable[[], bytes], int, str]] = {  # each is made by its test: together they are 150 MB
    "brackets that never close": (lambda: b"[" * (8 * MIB - 1), 400, "JSON"),
    "nested 100,000 deep": (lambda: nested(100_000), 400, "nested"),
    "nested 2,000 deep": (lambda: nested(2_000), 400, "nested"),
    "nested 500 deep": (lambda: nested(500), 200, ""),
    "1e400": (lambda: with_number(b"1e400"), 400, "larger than any number"),
    "-1e400": (lambda: with_number(b"-1e400"), 400, "larger than any number"),
    "a number of 5,000 digits": (lambda: with_number(b"9" * 5_000), 400, "JSON"),
    "a number of 4,000 digits": (lambda: with_number(b"9" * 4_000), 400, "larger than any number"),
    "1,900 numbers of 4,290 digits": (lambda: with_number(listed(b"9" * 4_290, 1_900)), 400, "JSON"),
    "400 numbers of 4,290 digits": (lambda: with_number(listed(b"9" * 4_290, 400)), 400, "larger than any number"),
    "a million objects": (lambda: with_number(listed(b'{"a":1}', 1_000_000)), 400, "at most 300000"),
    "2.6 million lists": (lambda: with_number(listed(b"[]", 2_600_000)), 400, "at most 300000"),
    "2.6 million lists in a tool": (
        lambda: asking(tools=[{"type": "function", "function": {"name": "f", "parameters": "HERE"}}]).replace(
            b'"HERE"', listed(b"[]", 2_600_000)
        ),
        400,
        "at most 300000",
    ),
    "4 million numbers": (lambda: with_number(listed(b"1", 3_900_000)), 200, ""),
    "4 million numbers beside half a character": (
        lambda: asking(user="\ud800", note="HERE").replace(b'"HERE"', listed(b"1", 3_900_000)),
        400,
        "lone surrogates",
    ),
    "1e-400": (lambda: with_number(b"1e-400"), 200, ""),
    "NaN": (lambda: with_number(b"NaN"), 400, "JSON"),
    "a temperature of 1e400": (lambda: asking(temperature=7).replace(b"7", b"1e400"), 400, "larger than any number"),
    "max_tokens beyond 64 bits": (lambda: asking(max_tokens=2**70), 400, "an integer"),
    "top_k beyond what a record holds": (lambda: asking(top_k=2**63), 400, "an integer"),
    "a seed beyond 64 bits": (lambda: asking(seed=2**70), 400, "seed"),
    "the same key twice: the last one counts": (
        lambda: b'{"messages": 1, "messages": [{"role": "user", "content": "Hi", "content": "Ho"}]}',
        200,
        "",
    ),
    "100,000 keys": (lambda: asking(note={f"k{n}": n for n in range(100_000)}), 200, ""),
    "a line of 8 MiB": (lambda: asking(user="x" * (8 * MIB - 200)), 413, "recorded"),
    "a line of 7 MB": (lambda: asking(user="x" * 7_000_000), 200, ""),
    "a message of 7 MB": (
        lambda: asking(messages=[{"role": "user", "content": "x" * 7_000_000}]),
        400,
        "maximum context length is",
    ),
    "250,000 empty messages": (
        lambda: asking(messages=[{"role": "user", "content": ""}] * 250_000),
        400,
        "250000 messages",
    ),
    "100,000 tools": (
        lambda: asking(tools=[{"type": "function", "function": {"name": "f"}}] * 100_000),
        400,
        "maximum context length is",
    ),
    "a message of 3,000 parts": (
        lambda: asking(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 3_000}]),
        200,
        "",
    ),
    "a message of 200,000 parts": (
        lambda: asking(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 200_000}]),
        400,
        "maximum context length is",
    ),
    "gzip": (lambda: gzip.compress(b"[" * 50 * MIB), 400, "JSON"),
    "10 MB": (lambda: b"x" * 10_000_000, 413, "8388608"),
    "UTF-16, which Python reads too": (lambda: '{"messages": []}'.encode("utf-16"), 400, "at least one message"),
    "half of UTF-16": (lambda: '{"messages": []}'.encode("utf-16")[:-1], 400, "JSON"),
    "a byte order mark": (lambda: b"\xef\xbb\xbf" + asking(), 200, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize(("body", "status", "words"), BODIES.values(), ids=BODIES.keys())
async def test_a_body_that_is_too_much_is_refused_or_read_and_others_are_answered_meanwhile(
    gateway: RunningGateway, body: Callable[[], bytes], status: int, words: str
) -> None:
    made = body()

    async def ask() -> Response:
        async with gateway.client.post(f"{gateway.url}/v1/chat/completions", data=io.BytesIO(made)) as answer:
            return await read(answer)

    asked = asyncio.create_task(ask())
    longest_s = 0.0
    while not asked.done():
        started = time.thread_time()  # of the event loop: what holds others up, however busy the machine is
        assert (await gateway.get("/healthz"))[0] == 200
        longest_s = max(longest_s, time.thread_time() - started)
    answer = await asked
    assert (answer.status, words in json.dumps(answer.body)) == (status, True)
    assert longest_s < 1.0


def endless(piece: bytes) -> Iterator[bytes]:
    while True:
        yield piece


ENDLESS: dict[str, tuple[bytes, bytes, int]] = {
    "a header": (HEAD + b"h: ", b"x" * 8192, 431),
    "headers": (HEAD, b"h: x\r\n" * 1000, 431),
    "a path": (b"GET /", b"x" * 8192, 431),
    "a method": (b"", b"X" * 8192, 400),
    "empty lines": (b"", b"\r\n" * 4096, 431),
    "a chunk extension": (IN_CHUNKS + b"1;", b"x" * 8192, 431),
    "trailers": (IN_CHUNKS + b"2\r\n{}\r\n0\r\n", b"h: x\r\n" * 1000, 431),
    "a trailer": (IN_CHUNKS + b"2\r\n{}\r\n0\r\nh: ", b"x" * 8192, 431),
    "chunks": (IN_CHUNKS, b"400\r\n" + b"x" * 1024 + b"\r\n", 413),
    "chunks of one byte": (IN_CHUNKS, b"1\r\nx\r\n" * 1000, 413),
}


@pytest.mark.slow
@pytest.mark.parametrize(("start", "piece", "status"), ENDLESS.values(), ids=ENDLESS.keys())
async def test_what_never_ends_is_ended_and_nothing_is_held_of_it(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, piece: bytes, status: int
) -> None:
    monkeypatch.setattr(body, "_DISCARDED_S", 1.0)
    async with running_gateway(tokenizer_folder, bounds=Bounds(max_body_bytes=MIB)) as gateway:
        before = psutil.Process().memory_info().rss
        async with wire(gateway.url) as connection, asyncio.timeout(60), asyncio.TaskGroup() as group:
            writing = group.create_task(connection.write(start, pieces=endless(piece)))
            said = await connection.said()
            writing.cancel()
        grown = psutil.Process().memory_info().rss - before
        assert (await gateway.chat()).status == 200
    assert said.closed
    assert said.statuses in ([status], [])  # a client that writes into a closed connection may lose the answer
    assert grown < 32 * MIB


async def test_a_body_that_nobody_asked_for_is_not_read_for_ever(tokenizer_folder: Path) -> None:
    body = endless(b"400\r\n" + b"x" * 1024 + b"\r\n")
    async with (
        running_gateway(tokenizer_folder, api_key="k", bounds=Bounds(idle_timeout_s=0.3)) as gateway,
        wire(gateway.url) as connection,
        asyncio.timeout(30),
        asyncio.TaskGroup() as group,
    ):
        writing = group.create_task(connection.write(IN_CHUNKS, pieces=body))
        said = await connection.said()
        writing.cancel()
    assert (said.statuses[:1], said.closed) == ([401], True)


async def test_1000_requests_in_one_piece_are_answered_one_by_one(gateway: RunningGateway) -> None:
    alive = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    async with wire(gateway.url) as connection:
        await connection.write(alive * 1000 + post(question()))
        said = await connection.said(answers=1001)
    assert said.statuses == [200] * 1001
