"""A process that opens connections and leaves them alone: `python -m tests.parts.hostile.idle HOST PORT NUMBER`.

Every other one asks once first. It prints a line when all are open, and ends when its standard input does.
"""

import resource
import socket
import sys

PER_ADDRESS = 5_000  # a port names a connection from each of our addresses
ALIVE = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


def main(host: str, port: int, number: int) -> None:
    """Open `number` connections and wait."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    connections = []
    for index in range(number):
        connection = socket.create_connection((host, port), 30, (f"127.0.0.{2 + index // PER_ADDRESS}", 0))
        if index % 2:
            connection.sendall(ALIVE)
        connections.append(connection)
    for connection in connections[1::2]:
        assert b"200 OK" in connection.recv(4096)
    print(len(connections), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
