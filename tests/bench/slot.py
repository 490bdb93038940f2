"""A process that is started again whenever it ends, from nothing, as a person's would be."""

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clawstream.config import inherited_environment
from clawstream.local.servers.server_process import end_child, start_child

_STOPS_WITHIN_S = 45.0
_AGAIN_AFTER_S = 0.5  # one that ends of itself, as a part may while the broker is away


@dataclass(slots=True)
class Slot:
    """`keep` runs it; `pids` are those of its processes so far, the newest last."""

    argv: Sequence[str]
    log: Path
    pids: list[int] = field(default_factory=list)
    _process: asyncio.subprocess.Process | None = None
    _was_told: bool = False

    async def keep(self) -> None:
        """Run the process, again and again, until cancelled; it is gone afterwards."""
        try:
            while True:
                self._was_told = False
                environment = inherited_environment() | {"OMP_NUM_THREADS": "1"}
                self._process = await start_child(self.argv, log=self.log, environment=environment)
                self.pids.append(self._process.pid)
                await self._process.wait()
                await asyncio.sleep(0 if self._was_told else _AGAIN_AFTER_S)
        finally:
            if self._process is not None:
                await end_child(self._process, _STOPS_WITHIN_S)

    def send(self, number: signal.Signals) -> None:
        """Send the process that runs now a signal that ends it."""
        assert self._process is not None
        self._was_told = True
        self._process.send_signal(number)
