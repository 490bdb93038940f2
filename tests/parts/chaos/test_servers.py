"""The proxy knows a writer of the log by its requests, however they are cut, and loses its answers alone."""

import asyncio

import pytest

from clawstream.local.servers.server_process import HOST
from tests.chaos.servers import Proxy, _Requests

PRODUCE, FETCH = 0, 1


def _request(kind: int, body: bytes) -> bytes:
    rest = kind.to_bytes(2) + body
    return len(rest).to_bytes(4) + rest


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
def test_a_writer_is_known_by_its_first_produce_request(piece: int) -> None:
    # The bodies hold what would be a produce request if it stood at the beginning of one.
    stream = _request(FETCH, _request(PRODUCE, b"x" * 20)) * 2
    requests = _Requests()
    for data in (stream, _request(PRODUCE, b"y")):
        assert not requests.produces
        for at in range(0, len(data), piece):
            requests.feed(data[at : at + piece])
    assert requests.produces


async def test_a_writers_acknowledgement_is_lost_after_delivery_and_a_readers_answer_is_not() -> None:
    delivered = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            delivered.extend(data)
            writer.write(b"answer")
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    async with server, Proxy().running() as proxy:
        proxy.lead(server.sockets[0].getsockname()[1])
        async with proxy.dropping_acks():
            fetch_reader, fetch_writer = await asyncio.open_connection(HOST, proxy.port)
            fetch_writer.write(_request(FETCH, b"f"))
            assert await fetch_reader.readexactly(6) == b"answer"
            reader, writer = await asyncio.open_connection(HOST, proxy.port)
            writer.write(_request(PRODUCE, b"p"))
            async with asyncio.timeout(10):
                while not proxy.num_acks_dropped:
                    await asyncio.sleep(0)
        assert _request(PRODUCE, b"p") in bytes(delivered)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        fetch_writer.write(_request(FETCH, b"g"))
        assert await fetch_reader.readexactly(6) == b"answer"
        for one in (writer, fetch_writer):
            one.transport.abort()
