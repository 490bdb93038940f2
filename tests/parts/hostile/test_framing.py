"""Requests whose beginning or end two readers could see in different places: how each is read here.

The table is what was tried. A 200 is a request that every reader takes for the same one; all else is refused, and where
the place of its end is in doubt the connection is closed, so that nothing behind it is ever taken for a request.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.parts.gateway.running_gateway import RunningGateway, running_gateway, until
from tests.parts.hostile.raw import Said, post, question, wire

Q = question()
ASK = b"POST /v1/chat/completions HTTP/1.1"
HOST = b"host: x"
LENGTH = b"content-length: %d" % len(Q)
CHUNKED = b"transfer-encoding: chunked"
IN_CHUNKS = b"%x\r\n" % len(Q) + Q + b"\r\n0\r\n\r\n"
SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
UPGRADE = b"connection: Upgrade, HTTP2-Settings"  # as Java's HttpClient sends it with each request
H2C = b"upgrade: h2c"
ALIVE = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


def raw(*lines: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join([*lines, b"", body])


def page(line: bytes, *headers: bytes) -> bytes:
    return raw(line, *(headers or (HOST,)))


READ_AS_ONE: dict[str, tuple[bytes, list[int]]] = {
    "a length": (post(Q), [200]),
    "a length with zeros before it": (raw(ASK, HOST, b"content-length: 000%d" % len(Q), body=Q), [200]),
    "chunks": (raw(ASK, HOST, CHUNKED, body=IN_CHUNKS), [200]),
    "chunks, in capitals": (raw(ASK, HOST, b"TRANSFER-ENCODING: CHUNKED", body=IN_CHUNKS), [200]),
    "chunks, after a tab": (raw(ASK, HOST, b"transfer-encoding:\tchunked", body=IN_CHUNKS), [200]),
    "chunks with extensions": (raw(ASK, HOST, CHUNKED, body=b"%x;a=b" % len(Q) + IN_CHUNKS[2:]), [200]),
    "a header that only looks like Transfer-Encoding": (
        raw(ASK, HOST, LENGTH, b"transfer_encoding: chunked", body=Q),
        [200],
    ),
    "two at once": (post(Q) + ALIVE, [200, 200]),
    "a request in the body of another": (page(b"GET /healthz HTTP/1.1", HOST, b"content-length: 40") + SMUGGLED, [200]),
    "empty lines before it": (b"\r\n\r\n" + ALIVE, [200]),
    "two spaces before the path": (page(b"GET  /healthz HTTP/1.1"), [200]),
    "HTTP/1.0": (page(b"GET /healthz HTTP/1.0"), [200]),
    "an absolute address, read as its path": (page(b"GET http://evil/healthz HTTP/1.1"), [200]),
    "a path with dots": (page(b"GET /v1/../healthz HTTP/1.1"), [404]),
    "a path with two slashes": (page(b"GET //healthz HTTP/1.1"), [404]),
    "a path with NUL and half a character": (page(b"GET /%ff%00 HTTP/1.1"), [404]),
    "a star": (page(b"OPTIONS * HTTP/1.1"), [404]),
    "TRACE": (page(b"TRACE /healthz HTTP/1.1"), [405]),
    "Expect: 100-continue": (raw(ASK, HOST, LENGTH, b"expect: 100-continue", body=Q), [100, 200]),
    "an expectation that nobody has": (raw(ASK, HOST, LENGTH, b"expect: 200-maybe", body=Q), [200]),
    "a header of 60 KB": (raw(ASK, HOST, LENGTH, b"h: " + b"x" * 60_000, body=Q), [200]),
    "100 headers": (raw(ASK, HOST, LENGTH, *[b"h%d: 1" % n for n in range(100)], body=Q), [200]),
    "a compressed body": (raw(ASK, HOST, LENGTH, b"content-encoding: gzip", body=Q), [415]),
    "bytes above ASCII as a session id": (raw(ASK, HOST, LENGTH, b"x-session-id: \xff\xfe", body=Q), [400]),
}
CLOSED: dict[str, tuple[bytes, int]] = {
    "a length and chunks": (raw(ASK, HOST, LENGTH, CHUNKED, body=IN_CHUNKS + SMUGGLED), 400),
    "chunks and a length": (raw(ASK, HOST, CHUNKED, LENGTH, body=IN_CHUNKS + SMUGGLED), 400),
    "two equal lengths": (raw(ASK, HOST, LENGTH, LENGTH, body=Q), 400),
    "two lengths": (raw(ASK, HOST, LENGTH, b"content-length: 5", body=Q), 400),
    "a list of lengths": (raw(ASK, HOST, b"content-length: 5, 5", body=Q), 400),
    "a length with a plus": (raw(ASK, HOST, b"content-length: +5", body=Q), 400),
    "a negative length": (raw(ASK, HOST, b"content-length: -1", body=Q), 400),
    "a hexadecimal length": (raw(ASK, HOST, b"content-length: 0x10", body=Q), 400),
    "a length beyond 64 bits": (raw(ASK, HOST, b"content-length: 99999999999999999999999", body=Q), 400),
    "an empty length": (raw(ASK, HOST, b"content-length:", body=Q), 400),
    "a length that is too short": (raw(ASK, HOST, b"content-length: 5", body=Q), 400),
    "another coding": (raw(ASK, HOST, b"transfer-encoding: xchunked", body=IN_CHUNKS), 501),
    "a quoted coding": (raw(ASK, HOST, b'transfer-encoding: "chunked"', body=IN_CHUNKS), 501),
    "no coding": (raw(ASK, HOST, b"transfer-encoding: identity", body=IN_CHUNKS), 501),
    "two codings": (raw(ASK, HOST, b"transfer-encoding: gzip, chunked", body=IN_CHUNKS), 501),
    "chunked, but not last": (raw(ASK, HOST, b"transfer-encoding: chunked, identity", body=IN_CHUNKS), 400),
    "chunked twice": (raw(ASK, HOST, CHUNKED, CHUNKED, body=IN_CHUNKS), 400),
    "chunked and then not": (raw(ASK, HOST, CHUNKED, b"transfer-encoding: identity", body=IN_CHUNKS), 400),
    "a space before the colon": (raw(ASK, HOST, b"transfer-encoding : chunked", body=IN_CHUNKS), 400),
    "a vertical tab before the coding": (raw(ASK, HOST, b"transfer-encoding: \x0bchunked", body=IN_CHUNKS), 400),
    "a coding on the next line": (raw(ASK, HOST, b"transfer-encoding:\r\n chunked", body=IN_CHUNKS), 400),
    "a coding that ends with NUL": (raw(ASK, HOST, b"transfer-encoding: chunked\0", body=IN_CHUNKS), 400),
    "chunks in HTTP/1.0": (raw(ASK.replace(b"1.1", b"1.0"), HOST, CHUNKED, body=IN_CHUNKS), 400),
    "a chunk of negative size": (raw(ASK, HOST, CHUNKED, body=b"-1\r\n" + Q), 400),
    "a chunk size with 0x": (raw(ASK, HOST, CHUNKED, body=b"0x" + IN_CHUNKS), 400),
    "a chunk size beyond 64 bits": (raw(ASK, HOST, CHUNKED, body=b"f" * 17 + b"\r\n"), 400),
    "a chunk size before a space": (raw(ASK, HOST, CHUNKED, body=b"%x \r\n" % len(Q) + Q), 400),
    "chunks ended by bare line feeds": (raw(ASK, HOST, CHUNKED, body=IN_CHUNKS.replace(b"\r\n", b"\n")), 400),
    "a line feed in a chunk extension": (raw(ASK, HOST, CHUNKED, body=b"%x;\nx" % len(Q) + IN_CHUNKS[2:]), 400),
    "a chunk that is longer than it says": (raw(ASK, HOST, CHUNKED, body=b"5\r\n" + Q + b"\r\n0\r\n\r\n"), 400),
    "bare line feeds": (raw(ASK, HOST, LENGTH, body=Q).replace(b"\r\n", b"\n"), 400),
    "a bare line feed in a header": (raw(ASK, HOST + b"\n" + LENGTH, body=Q), 400),
    "a bare carriage return in a header": (raw(ASK, HOST, b"a: b\rtransfer-encoding: chunked", LENGTH, body=Q), 400),
    "NUL in a header's name": (raw(ASK, HOST, b"a\0b: c", LENGTH, body=Q), 400),
    "NUL in a header's value": (raw(ASK, HOST, b"a: b\0c", LENGTH, body=Q), 400),
    "a space in a header's name": (raw(ASK, HOST, b"a b: c", LENGTH, body=Q), 400),
    "a header without a colon": (raw(ASK, HOST, b"abc", LENGTH, body=Q), 400),
    "a folded header": (raw(ASK, HOST, b"a: b\r\n c: d", LENGTH, body=Q), 400),
    "a space before the first header": (raw(ASK, b" host: x", LENGTH, body=Q), 400),
    "no host": (ALIVE.replace(b"host: x\r\n", b""), 400),
    "two hosts": (page(b"GET /healthz HTTP/1.1", HOST, b"host: y"), 400),
    "HTTP/2.0 in words": (page(b"GET /healthz HTTP/2.0"), 505),
    "HTTP/2's first bytes": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/0.9 in words": (page(b"GET /healthz HTTP/0.9"), 505),
    "HTTP/1.9": (page(b"GET /healthz HTTP/1.9"), 400),
    "RTSP": (page(b"DESCRIBE /healthz RTSP/1.0"), 405),
    "a method in small letters": (page(b"get /healthz HTTP/1.1"), 400),
    "a method that nobody knows": (page(b"SMUGGLE /healthz HTTP/1.1"), 400),
    "a tunnel": (page(b"CONNECT evil:443 HTTP/1.1"), 400),
    "an upgrade with a length and chunks": (
        raw(ASK, HOST, LENGTH, CHUNKED, UPGRADE, H2C, body=IN_CHUNKS + SMUGGLED),
        400,
    ),
    "an upgrade with a length that is too short": (
        raw(ASK, HOST, b"content-length: 5", UPGRADE, H2C, body=Q),
        400,
    ),
    "an upgrade to a tunnel": (raw(b"CONNECT evil:443 HTTP/1.1", HOST, LENGTH, UPGRADE, H2C, body=SMUGGLED), 400),
    "a tunnel with a length": (raw(b"CONNECT evil:443 HTTP/1.1", HOST, LENGTH, body=SMUGGLED), 400),
    "an absolute address without a path": (page(b"GET http://evil HTTP/1.1"), 400),
    "an address that is none": (page(b"GET http://[/healthz HTTP/1.1"), 400),
    "a path in UTF-8": (page("GET /hé HTTP/1.1".encode()), 400),
    "tabs in the first line": (page(b"GET\t/healthz\tHTTP/1.1"), 400),
    "a space after the version": (page(b"GET /healthz HTTP/1.1 "), 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 100, 400),
    "1,000 headers": (raw(ASK, HOST, LENGTH, *[b"h%d: 1" % n for n in range(1000)], body=Q), 431),
    "a header of 64 KB": (raw(ASK, HOST, LENGTH, b"h: " + b"x" * 65_536, body=Q), 431),
    "a path of 64 KB": (page(b"GET /" + b"x" * 65_536 + b" HTTP/1.1"), 431),
}
BEHIND = b"content-length: %d" % len(SMUGGLED)
UPGRADES: dict[str, tuple[bytes, bytes, list[int]]] = {
    "h2c with a length": (raw(ASK, HOST, LENGTH, UPGRADE, H2C), Q, [200]),
    "h2c in chunks": (raw(ASK, HOST, CHUNKED, UPGRADE, H2C), IN_CHUNKS, [200]),
    "h2c that would close": (raw(ASK, HOST, LENGTH, b"connection: close, upgrade", H2C), Q, [200]),
    "h2c, twice": (raw(ASK, HOST, LENGTH, UPGRADE, H2C, b"upgrade: websocket"), Q, [200]),
    "websocket": (raw(ASK, HOST, LENGTH, UPGRADE, b"upgrade: websocket"), Q, [200]),
    "a protocol that nobody knows": (raw(ASK, HOST, LENGTH, UPGRADE, b"upgrade: foo"), Q, [200]),
    "in HTTP/1.0": (raw(ASK.replace(b"1.1", b"1.0"), HOST, LENGTH, UPGRADE, H2C), Q, [200]),
    "a request for a body": (raw(ASK, HOST, BEHIND, UPGRADE, H2C), SMUGGLED, [400]),
    "a request for a body, in HTTP/1.0": (
        raw(ASK.replace(b"1.1", b"1.0"), HOST, BEHIND, UPGRADE, H2C),
        SMUGGLED,
        [400],
    ),
    "a page with a request for a body": (page(b"GET /healthz HTTP/1.1", HOST, BEHIND, UPGRADE, H2C), SMUGGLED, [200]),
    "a page without a body": (page(b"GET /healthz HTTP/1.1", HOST, UPGRADE, H2C), b"", [200]),
    "a request behind it": (raw(ASK, HOST, LENGTH, UPGRADE, H2C), Q + ALIVE, [200, 200]),
    "another upgrade behind it": (
        raw(ASK, HOST, LENGTH, UPGRADE, H2C),
        Q + raw(ASK, HOST, LENGTH, UPGRADE, H2C, body=Q),
        [200, 200],
    ),
}


@pytest.fixture(scope="module")
async def gateway(tokenizer_folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer_folder) as found:
        yield found


@pytest.mark.parametrize(("sent", "statuses"), READ_AS_ONE.values(), ids=READ_AS_ONE.keys())
async def test_it_is_one_request_and_the_next_one_is_another(
    gateway: RunningGateway, sent: bytes, statuses: list[int]
) -> None:
    async with wire(gateway.url) as connection:
        await connection.write(sent)
        said = await connection.said(answers=len(statuses))
        more = await connection.said(silence_s=0.05)
    assert (said.statuses, more.raw) == (statuses, b"")


@pytest.mark.parametrize(("sent", "status"), CLOSED.values(), ids=CLOSED.keys())
async def test_it_is_refused_once_and_nothing_behind_it_is_read(
    gateway: RunningGateway, sent: bytes, status: int
) -> None:
    gateway.engine.calls.clear()
    async with wire(gateway.url) as connection:
        await connection.write(sent)
        said = await connection.said()
    assert (said.statuses, said.closed) == ([status], True)
    assert gateway.engine.calls == []


@pytest.mark.parametrize("packets", [1, 2])
@pytest.mark.parametrize(("head", "rest", "statuses"), UPGRADES.values(), ids=UPGRADES.keys())
async def test_an_upgrade_is_ignored_and_its_body_is_a_body(
    gateway: RunningGateway,
    caplog: pytest.LogCaptureFixture,
    head: bytes,
    rest: bytes,
    statuses: list[int],
    packets: int,
) -> None:
    async with wire(gateway.url) as connection:
        if packets == 1:
            await connection.write(ALIVE + head + rest)
            first = Said(b"", False)
        else:
            await connection.write(ALIVE + head)
            first = await connection.said(answers=1)  # so the head was read
            await connection.write(rest)
        then = await connection.said(answers=1 + len(statuses) - len(first.statuses))
        more = await connection.said(silence_s=0.05)
    assert first.statuses + then.statuses + more.statuses == [200, *statuses]
    assert "uvicorn[standard]" not in caplog.text


@pytest.mark.slow
async def test_4000_upgrades_in_one_piece_are_answered_one_by_one(gateway: RunningGateway) -> None:
    async with wire(gateway.url) as connection:
        await connection.write(page(b"GET /healthz HTTP/1.1", HOST, UPGRADE, H2C) * 4000)
        said = await connection.said(answers=4000)
    assert said.statuses == [200] * 4000


async def test_trailers_say_nothing(gateway: RunningGateway) -> None:
    evil = b"x-session-id: evil\r\nauthorization: Bearer evil\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    async with wire(gateway.url) as connection:
        await connection.write(raw(ASK, HOST, CHUNKED, body=IN_CHUNKS[:-2] + evil) + ALIVE)
        said = await connection.said(answers=2)
    assert said.statuses == [200, 200]
    assert b"evil" not in said.raw


async def test_a_request_behind_a_stream_waits_for_its_end_and_rubbish_does_not_get_into_it(
    gateway: RunningGateway,
) -> None:
    gateway.engine.hold()
    async with wire(gateway.url) as connection:
        await connection.write(post(question(stream=True)), b"\x00\x01")
        said = await connection.said()
    gateway.engine.release()
    assert said.closed
    assert said.statuses in ([], [400])


@pytest.mark.parametrize("answered_before", [b"", ALIVE], ids=["nothing", "a request"])
async def test_a_client_that_leaves_with_a_request_waiting_frees_the_engine(
    gateway: RunningGateway, answered_before: bytes
) -> None:
    gateway.engine.hold()
    async with wire(gateway.url) as connection:
        await connection.write(answered_before + post(question(stream=True)) + ALIVE)
        await until(gateway.generating)

    async def free() -> bool:
        return not gateway.engine.running

    await until(free)
    gateway.engine.release()
