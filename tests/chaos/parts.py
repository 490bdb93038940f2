"""The processes of the installation under test: each is started again when it ends, however it ended."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from clawstream.config import inherited_environment
from tests.chaos.launch import launch

_OPERATOR = 2  # the exit status for something that a person has to change, or that passes
_STOPS_WITHIN_S = 45.0
_TRAINING = ("torch._dynamo", "clawstream.training.loop", "clawstream.training.torch_model")
_FORKED = multiprocessing.get_context("forkserver")
_AGAIN_AFTER_S = 0.5  # one that ends at once


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
    stage: str
    arguments: Mapping[str, Any]  # of `launch`
    port: int  # where it serves; 0: nowhere
    may_start: asyncio.Event  # again, once it has ended of itself
    lives: list[Life] = field(default_factory=list)
    _process: ForkServerProcess | None = None

    @property
    def log(self) -> Path:
        """What its processes said."""
        path: Path = self.arguments["log"]
        return path

    @property
    def config(self) -> Path:
        """Its settings."""
        path: Path = self.arguments["config"]
        return path

    async def keep(self) -> None:
        """Run the process, again and again, until cancelled; it is gone afterwards."""
        try:
            while True:
                await self._live()
                life = self.lives[-1]
                if life.killed_s is None and life.told_to_stop_s is None:
                    await asyncio.sleep(_AGAIN_AFTER_S)
                    await self.may_start.wait()
        finally:
            await self._end()

    def send(self, number: signal.Signals) -> bool:
        """Send the process a signal; False: there is none."""
        process = self._process
        if process is None or not process.is_alive():
            return False
        assert process.pid is not None
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
        process = _FORKED.Process(target=launch, args=(self.stage,), kwargs=dict(self.arguments), daemon=True)
        process.start()
        self._process = process
        self.lives.append(Life(began_s=time.monotonic()))
        await _ended(process)
        self.lives[-1].status = process.exitcode
        self.lives[-1].ended_s = time.monotonic()

    async def _end(self) -> None:
        process = self._process
        if process is None or not process.is_alive():
            return
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)
        process.terminate()
        try:
            async with asyncio.timeout(_STOPS_WITHIN_S):
                await _ended(process)
        except TimeoutError:
            process.kill()
            await _ended(process)


async def preload(*, training: bool) -> None:
    """Have the process ready that parts are forks of; call it once, from the main thread, before the first part."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in os.environ.keys() - inherited_environment().keys():
        del os.environ[name]
    _FORKED.set_forkserver_preload([*(_TRAINING if training else ()), "tests.chaos.preloading"])
    forkserver.ensure_running()  # here: it ends with the thread that starts it
    first = _FORKED.Process(target=int)
    await asyncio.to_thread(first.start)
    await _ended(first)
    assert first.exitcode == 0, "the process that all others are forks of has not come up"


async def _ended(process: ForkServerProcess) -> None:
    """Return when the process is gone."""
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(process.sentinel, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(process.sentinel)
    process.join()
