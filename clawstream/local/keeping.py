"""Keeps our own broker and database running: a server that ends is started again with its data, port and password."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from clawstream.errors import PartUnavailable
from clawstream.local.supervisor import Patience

_LOOK_EVERY_S = 0.25


class RestartableServer(Protocol):
    """A server that was started once."""

    log: Path

    def exit_status(self) -> int | None:
        """None while it runs; else its exit status."""

    def restart(self) -> None:
        """Start it again on its kept data; raises PartUnavailable or OSError where that can't be done."""


async def keep(server: RestartableServer, *, say: Callable[[str], None], patience: Patience | None = None) -> None:
    """Start `server` again whenever it ends, until this is cancelled; tell `say` of each end and each obstacle."""
    patience = patience or Patience()
    name, quick_deaths = type(server).__name__.removeprefix("Embedded"), 0
    started = time.monotonic()
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        status = server.exit_status()
        if status is None:
            continue
        quick_deaths = 0 if time.monotonic() - started >= patience.steady_after_s else quick_deaths + 1
        say(f"{name} ended with {status}: starting it again on its data (its log: {server.log})")
        hindered: str | None = None
        while True:
            await asyncio.sleep(patience.restart_wait_s(quick_deaths))
            found = await _restarted(server)
            if found is None:
                break
            quick_deaths += 1
            if found != hindered:
                say(f"{name} can't be started yet, and is tried again: {found}")
                hindered = found
        say(f"{name} runs again")
        started = time.monotonic()


async def _restarted(server: RestartableServer) -> str | None:
    """Return what kept the server from starting; if this is cancelled, the attempt ends first."""
    starting = asyncio.get_running_loop().run_in_executor(None, server.restart)
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait([starting])
        raise
    except (PartUnavailable, OSError) as error:
        return str(error)
    return None
