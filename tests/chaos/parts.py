"""The processes of the installation under test: each is started again when it ends, however it ended."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clawstream.config import inherited_environment
from clawstream.local.leash import die_with_parent

_OPERATOR = 2  # the exit status for something that a person has to change, or that passes
_STOPS_WITHIN_S = 45.0
_AGAIN_AFTER_S = 0.5  # one that ends at once, as a part may while the broker is away


@dataclass(slots=True, kw_only=True)
class Life:
    """One process of a part, by the monotonic clock."""

    began_s: float
    killed_s: float | None = None
    told_to_stop_s: float | None = None
    ended_s: float | None = None
    heard_s: float | None = None  # when it first answered anything
    status: int | None = None  # as it ended; minus n for signal n

    def is_away(self, at_s: float) -> bool:
        """Whether it has not begun to serve yet, or no longer."""
        return self.heard_s is None or (self.told_to_stop_s is not None and self.told_to_stop_s <= at_s)


@dataclass(slots=True)
class Part:
    """A slot of the installation; `keep` runs it."""

    name: str
    argv: Sequence[str]
    log: Path
    lives: list[Life] = field(default_factory=list)
    _process: asyncio.subprocess.Process | None = None

    async def keep(self) -> None:
        """Run the process, again and again, until cancelled; it is gone afterwards."""
        try:
            while True:
                await self._live()
                life = self.lives[-1]
                asked = life.killed_s is not None or life.told_to_stop_s is not None
                await asyncio.sleep(0 if asked else _AGAIN_AFTER_S)
        finally:
            await self._end()

    def send(self, number: signal.Signals) -> bool:
        """Send the process a signal; False: there is none."""
        process = self._process
        if process is None or process.returncode is not None:
            return False
        if number is signal.SIGKILL:
            self.lives[-1].killed_s = time.monotonic()
        elif number is signal.SIGTERM:
            self.lives[-1].told_to_stop_s = time.monotonic()
        os.kill(process.pid, number)
        return True

    def answers(self) -> None:
        """The process that runs now was heard from."""
        life = self.lives[-1]
        life.heard_s = life.heard_s or time.monotonic()

    def cut(self, since_s: float, until_s: float) -> bool:
        """Whether a process of ours was killed, or ended, between the two."""
        ends = [life.ended_s if life.killed_s is None else life.killed_s for life in self.lives]
        return any(end_s is not None and since_s <= end_s <= until_s for end_s in ends)

    def was_away(self, since_s: float, until_s: float) -> bool:
        """Whether at some time between the two there was nobody who should take a request."""
        lives = [life for life in self.lives if life.began_s <= until_s and (life.ended_s or until_s) >= since_s]
        return not lives or self.cut(since_s, until_s) or any(life.is_away(until_s) for life in lives)

    @property
    def num_crashes(self) -> int:
        """How many of its processes ended as a bug ends them: by no signal, and not for an operator to mend."""
        statuses = [life.status for life in self.lives if life.status is not None]
        return sum(status > 0 and status != _OPERATOR for status in statuses)

    async def _live(self) -> None:
        with self.log.open("ab") as words:
            self._process = await asyncio.create_subprocess_exec(
                *self.argv,
                stdin=asyncio.subprocess.DEVNULL, stdout=words, stderr=words,
                env=inherited_environment() | {"OMP_NUM_THREADS": "1"}, preexec_fn=die_with_parent,
            )  # fmt: skip
        self.lives.append(Life(began_s=time.monotonic()))
        self.lives[-1].status = await self._process.wait()
        self.lives[-1].ended_s = time.monotonic()

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
            process.terminate()
        try:
            async with asyncio.timeout(_STOPS_WITHIN_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def command(config: Path, *arguments: str, without: str | None, disk: Path) -> tuple[str, ...]:
    """Return how a part is started: the command line of clawstream in a process that the rig can break."""
    guard = ("--without", without) if without is not None else ()
    return (
        sys.executable, "-m", "tests.chaos.launch", "--disk", str(disk), *guard, "--", "--config", str(config),
        *arguments,
    )  # fmt: skip
