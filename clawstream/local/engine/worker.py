"""The thread that owns the core: commands come in through a queue, deltas go out to the event loop once per step.

Nothing else touches the core. When the thread ends, for whatever reason, every request is told and the server stops.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

import torch

from clawstream.local.engine.core import Core, Output

Result = TypeVar("Result")
# The longest a step waits for the event loop to take the tokens of the step before.
_HAND_OVER_S = 0.01

Command = Callable[[Core], Iterable[Output]]


class EngineWorker:
    """Runs `core` until `stop`; deltas reach their sinks on `loop`."""

    def __init__(
        self, core: Core, loop: asyncio.AbstractEventLoop, *, num_threads: int, on_end: Callable[[], None]
    ) -> None:
        self._core = core
        self._loop = loop
        self._num_threads = num_threads
        self._on_end = on_end
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._paused = False
        self._handed_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-worker", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, which then takes commands."""
        self._thread.start()

    def stop(self) -> None:
        """Abort running requests and end the thread."""
        self._commands.put(None)
        self._thread.join()

    def post(self, command: Command) -> None:
        """Queue the command; it runs between two steps, after those posted before it."""
        self._commands.put(command)

    async def call(self, function: Callable[[Core], Result]) -> Result:
        """Run the function between two steps and return its result."""
        future: Future[Result] = Future()

        def command(core: Core) -> Iterable[Output]:
            try:
                future.set_result(function(core))
            except BaseException as error:  # the waiting caller gets the error, and the worker ends as it would have
                future.set_exception(error)
                raise
            return ()

        self.post(command)
        return await asyncio.wrap_future(future)

    async def pause(self, *, retract: bool) -> None:
        """Run no step until `resume`."""

        def stop_stepping(core: Core) -> None:
            self._paused = True
            if retract:
                core.retract()

        await self.call(stop_stepping)

    async def resume(self) -> None:
        """Let steps run again."""

        def step_again(_core: Core) -> None:
            self._paused = False

        await self.call(step_again)

    def _run(self) -> None:
        # OpenMP keeps the number of threads per calling thread.
        torch.set_num_threads(self._num_threads)
        try:
            while self._obey():
                if self._core.busy and not self._paused:
                    self._deliver(self._core.step())
        finally:
            for job in self._core.jobs():
                self._deliver(self._core.abort(job, "The engine is stopping."))
            self._loop.call_soon_threadsafe(self._on_end)

    def _obey(self) -> bool:
        """Run the queued commands; wait for one when there is nothing to compute. False after `stop`."""
        block = self._paused or not self._core.busy
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._deliver(command(self._core))
            block = False

    def _deliver(self, outputs: Iterable[Output]) -> None:
        batch = list(outputs)
        if batch:
            self._handed_over.clear()
            self._loop.call_soon_threadsafe(self._push, batch)
            # Without this the next step may hold the interpreter while the tokens wait for the event loop's turn.
            self._handed_over.wait(_HAND_OVER_S)

    def _push(self, batch: list[Output]) -> None:
        for job, delta in batch:
            job.sink.push(delta)
        self._handed_over.set()
