"""A reserved port is nobody's but the server's."""

import socket
from pathlib import Path

import pytest

from clawstream.errors import PartUnavailable
from clawstream.local.servers.server_process import HOST, reserved, reserved_again


def test_a_server_listens_on_its_reserved_port() -> None:
    with reserved() as port:
        server = socket.create_server((HOST, port))
    with server, socket.create_connection((HOST, port), timeout=5):
        pass


def test_two_reservations_are_two_ports() -> None:
    with reserved() as first, reserved() as second:
        assert first != second


def test_a_reserved_port_is_refused_to_a_second_reservation() -> None:
    refused = pytest.raises(PartUnavailable, match=r"port \d+ of 127.0.0.1 can't be had")
    with reserved() as port, refused, reserved(port):
        pass


def test_a_port_that_somebody_listens_on_is_refused() -> None:
    refused = pytest.raises(PartUnavailable, match="can't be had")
    with socket.create_server((HOST, 0)) as server, refused, reserved(server.getsockname()[1]):
        pass


def test_a_port_is_free_again_after_its_reservation() -> None:
    with reserved() as port:
        pass
    with reserved(port) as again:
        assert again == port


def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    with (
        reserved() as port,
        pytest.raises(PartUnavailable, match=rf"port {port} of {HOST} \(engine\.port\)"),
        reserved(port, setting="engine.port"),
    ):
        pass


def test_a_port_whose_server_ended_a_moment_ago_is_had_at_once() -> None:
    server = socket.create_server((HOST, 0))
    port = server.getsockname()[1]
    client = socket.create_connection((HOST, port), timeout=5)
    accepted, _ = server.accept()
    accepted.close()  # who closes first keeps the connection for a minute, in TIME_WAIT
    assert client.recv(1) == b""
    client.close()
    server.close()
    with reserved(port) as again:
        with socket.create_server((HOST, again)):
            pass
        with pytest.raises(PartUnavailable, match="can't be had"), reserved(port):
            pass


def test_a_server_has_the_port_that_it_had_last_unless_somebody_else_has_it(tmp_path: Path) -> None:
    with reserved_again(tmp_path) as first:
        pass
    with reserved_again(tmp_path) as second:
        pass
    with reserved(second), reserved_again(tmp_path) as third:
        pass
    assert first == second != third
