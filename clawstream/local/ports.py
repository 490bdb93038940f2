"""Free ports of 127.0.0.1, kept for the server that was promised one until it listens.

A port that was only looked up can be taken by anybody before the server gets there.
"""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from clawstream.errors import PartUnavailable

HOST = "127.0.0.1"


@contextmanager
def reserved(port: int | None = None, *, setting: str | None = None) -> Iterator[int]:
    """Keep a free port, or `port`, from everybody but a server that binds with SO_REUSEADDR, as nearly all do.

    Raises PartUnavailable where it can't be had, naming the `setting` that asks for it.

    Start the server within the block, and leave it once the server listens. Only Linux can share a port in that way;
    elsewhere the port is let go before the block runs.
    """
    with socket.socket() as keeper:
        try:
            keeper.bind((HOST, port or 0))
        except OSError as error:
            named = "" if setting is None else f" ({setting})"
            raise PartUnavailable(
                f"port {port} of {HOST}{named} can't be had: {error.strerror}. Nothing was started. "
                "Stop what listens there, or choose another port"
            ) from error
        found: int = keeper.getsockname()[1]
        if sys.platform == "linux":
            # Set after the bind: our own bind must not share a port that somebody else has.
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            keeper.close()
        yield found
