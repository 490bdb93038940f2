"""Clients that make others wait: who sends slowly, who reads nothing, and 10,000 who do nothing at all."""

import asyncio
import gc
import json
import re
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from clawstream.events import ExchangeFailed, FailureReason
from clawstream.gateway.access.key_file import add_key
from clawstream.gateway.access.keys import Allowance
from clawstream.gateway.http.connection import Bounds
from tests.fakes.scripted_engine import ScriptedAnswer
from tests.parts.gateway.running_gateway import RunningGateway, running_gateway, until
from tests.parts.hostile.raw import Wire, post, question, wire

MIB = 2**20
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
SLOW: dict[str, tuple[bytes, list[int]]] = {
    "nothing": (b"", []),
    "an empty line": (b"\r\n", []),
    "a line that does not end": (b"POST /v1/chat", [408]),
    "HTTP/0.9": (b"GET /healthz\r\n", [408]),
    "headers that do not end": (HEAD, [408]),
    "a body that does not begin": (HEAD + b"content-length: 10\r\n\r\n", [408]),
    "a body that does not end": (HEAD + b"content-length: 10\r\n\r\n{", [408]),
    "a chunk that does not end": (HEAD + b"transfer-encoding: chunked\r\n\r\nff\r\n{", [408]),
    "an answer, and nothing more": (b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", [200]),
    "an answer, and an empty line": (b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n\r\n", [200]),
    "an answer, and half a request": (b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET", [200, 408]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "statuses"), SLOW.values(), ids=SLOW.keys())
async def test_a_client_that_sends_no_more_is_let_go(tokenizer_folder: Path, sent: bytes, statuses: list[int]) -> None:
    async with (
        running_gateway(tokenizer_folder, bounds=Bounds(request_timeout_s=0.2, idle_timeout_s=0.3)) as gateway,
        wire(gateway.url) as connection,
    ):
        await connection.write(sent)
        said = await connection.said()
    assert (said.statuses, said.closed) == (statuses, True)


@pytest.mark.parametrize("start", [HEAD, HEAD + b"content-length: 1000\r\n\r\n"], ids=["headers", "body"])
async def test_a_byte_now_and_then_does_not_keep_a_request_open(tokenizer_folder: Path, start: bytes) -> None:
    async def drip(connection: Wire) -> None:
        await connection.write(start)
        while True:
            await connection.write(b"x")
            await asyncio.sleep(0.05)

    async with (
        running_gateway(tokenizer_folder, bounds=Bounds(request_timeout_s=0.5)) as gateway,
        wire(gateway.url) as connection,
        asyncio.TaskGroup() as group,
    ):
        dripping = group.create_task(drip(connection))
        said = await connection.said()
        dripping.cancel()
    assert (said.statuses, said.closed) == ([408], True)


async def test_one_keys_half_sent_bodies_keep_nobody_else_out(tokenizer_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    mine, theirs = (add_key(path, name, Allowance()).encode() for name in ("anna", "ben"))
    half = HEAD + b"x-api-key: %b\r\ncontent-length: 1000\r\n\r\n{"
    async with running_gateway(tokenizer_folder, keys_file=path, max_in_flight=8) as gateway, AsyncExitStack() as stack:
        halves = [await stack.enter_async_context(wire(gateway.url)) for _ in range(20)]
        for connection in halves:
            await connection.write(half % theirs)
        refused = [asyncio.create_task(connection.said(answers=1)) for connection in halves]

        async def all_but_a_share() -> bool:
            return sum(task.done() for task in refused) == 18

        await until(all_but_a_share)
        answers = [await gateway.chat(headers={"x-api-key": mine.decode()}) for _ in range(3)]
        waiting = await gateway.chat(headers={"x-api-key": theirs.decode()})
        statuses = [task.result().statuses for task in refused if task.done()]
        for task in refused:
            task.cancel()
    assert statuses == [[429]] * 18
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert waiting.status == 429


async def test_without_keys_half_sent_bodies_keep_nobody_out(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, max_in_flight=8) as gateway, AsyncExitStack() as stack:
        for _ in range(20):
            connection = await stack.enter_async_context(wire(gateway.url))
            await connection.write(HEAD + b"content-length: 1000\r\n\r\n{")
        assert [(await gateway.chat()).status for _ in range(3)] == [200, 200, 200]


async def test_a_stream_that_is_silent_for_long_is_not_idle(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, bounds=Bounds(request_timeout_s=0.1, idle_timeout_s=0.1)) as gateway:
        gateway.engine.hold()
        asked = asyncio.create_task(gateway.chat(stream=True))
        await until(gateway.generating)
        for _ in range(3):  # who comes later and is idle is let go meanwhile, one after the other
            async with wire(gateway.url) as idle:
                assert (await idle.said()).closed
        gateway.engine.release()
        assert (await asked).done


@asynccontextmanager
async def deaf(url: str) -> AsyncIterator[socket.socket]:
    """A connection whose client has next to no room for an answer, and never reads one."""
    address = urlsplit(url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (address.hostname, address.port))
        yield client


def say_much(gateway: RunningGateway, num_tokens: int) -> None:
    """The engine answers at length."""
    gateway.engine.context_length_tokens = num_tokens + 1000
    ids = (*gateway.renderer.encode("x" * num_tokens), gateway.renderer.stop_token_ids[0])
    gateway.engine.script = lambda _prompt: ScriptedAnswer(token_ids=ids)


async def with_room(gateway: RunningGateway, num_tokens: int) -> None:
    async def heard() -> bool:
        return bool(json.loads((await gateway.get("/v1/models"))[1])["data"][0]["max_model_len"] > num_tokens)

    await until(heard)


@pytest.mark.slow
async def test_a_client_that_reads_nothing_is_gone_after_the_write_timeout_and_holds_nobody_up(
    tokenizer_folder: Path,
) -> None:
    num_tokens, num_clients = 30_000, 8
    async with running_gateway(tokenizer_folder, bounds=Bounds(write_timeout_s=2.0)) as gateway:
        say_much(gateway, num_tokens)
        await with_room(gateway, num_tokens)
        body = question(stream=True, max_tokens=num_tokens)
        gc.collect()
        before = psutil.Process().memory_info().rss
        started, longest_s = time.perf_counter(), 0.0
        clients = [deaf(gateway.url) for _ in range(num_clients)]
        for client in clients:
            await asyncio.get_running_loop().sock_sendall(await client.__aenter__(), post(body))
        await until(gateway.generating)
        while gateway.engine.running:
            asked = time.perf_counter()
            assert (await gateway.get("/healthz"))[0] == 200
            longest_s = max(longest_s, time.perf_counter() - asked)
            assert time.perf_counter() - started < 60
        grown = psutil.Process().memory_info().rss - before
        failed = await gateway.recorded(ExchangeFailed, at_least=num_clients)
        for client in clients:
            await client.__aexit__(None, None, None)
        gateway.say("Ok.")
        assert (await gateway.chat()).status == 200
    assert {failure.reason for failure in failed} == {FailureReason.CLIENT_GONE}
    assert max(len(failure.output_ids) for failure in failed) < num_tokens / 2
    assert longest_s < 1.0
    assert grown < 32 * MIB


@pytest.mark.slow
async def test_a_client_that_reads_slowly_gets_all_of_it(tokenizer_folder: Path) -> None:
    num_tokens = 4_000
    async with (
        running_gateway(tokenizer_folder, bounds=Bounds(write_timeout_s=1.0)) as gateway,
        wire(gateway.url) as connection,
    ):
        say_much(gateway, num_tokens)
        await with_room(gateway, num_tokens)
        await connection.write(post(question(stream=True, max_tokens=num_tokens)))
        pieces: list[bytes] = []
        while b"[DONE]" not in b"".join(pieces[-2:]):
            pieces.append(await connection.reader.read(65_536))
            assert pieces[-1], "the connection was cut"
            await asyncio.sleep(0.1)
    # Tokens that arrive together are one chunk.
    shown = re.findall(rb'"content":"(x+)"', b"".join(pieces))
    assert len(b"".join(shown)) == num_tokens


@pytest.mark.slow
async def test_10000_idle_connections_hold_nobody_up(tokenizer_folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    number = 10_000
    assert hard > number + 500, f"10,000 connections need 10,500 open files; the limit is {hard} (ulimit -Hn)"
    async with running_gateway(tokenizer_folder, bounds=Bounds(idle_timeout_s=100.0)) as gateway:
        address = urlsplit(gateway.url)
        gc.collect()
        before = psutil.Process().memory_info().rss
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.parts.hostile.idle", str(address.hostname), str(address.port), str(number)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdin is not None
        assert int(await child.stdout.readline()) == number
        grown = psutil.Process().memory_info().rss - before
        slowest_s = 0.0
        for _ in range(20):
            asked = time.perf_counter()
            assert (await gateway.chat(stream=True)).done
            slowest_s = max(slowest_s, time.perf_counter() - asked)
        print(f"{number} idle connections: {grown / number / 1024:.1f} KiB each, slowest answer {slowest_s:.3f} s")
        assert psutil.Process().num_fds() > number
        child.stdin.close()
        assert await child.wait() == 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert slowest_s < 1.0
    assert grown < number * 20 * 1024
