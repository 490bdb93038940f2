"""All parts of one installation as child processes, and its own servers: started in order, restarted, stopped together.

A child never outlives its supervisor, and a Ctrl-C in the terminal reaches the supervisor alone. A part that a person
has to look at stays down, and the others go on.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clawstream.errors import PartUnavailable, TooManyFailures
from clawstream.local.running import PartState, write_parts
from clawstream.local.servers.server_process import end_child, kill_group, last_lines, start_child
from clawstream.stream.stage import now_ms

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05
_SERVER_LOOK_EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A process to keep running; `missing` returns why it is not ready yet, and is asked until it returns None."""

    name: str
    command: tuple[str, ...]
    missing: Callable[[], Awaitable[str | None]] | None = None  # None: it is ready as soon as it runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the supervisor waits, and how often it tries."""

    ready_within_s: float = 120.0
    silent_s: float = 10.0  # after this, the part's obstacle is reported, and again when it changes
    stop_within_s: float = 20.0  # after this, the part is killed
    steady_after_s: float = 30.0  # a part that ran this long is restarted at once
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0
    start_tries: int = 3  # a part that dies this often before it was ever ready or steady ends the installation

    def restart_wait_s(self, quick_deaths: int) -> float:
        """Return how long to wait before restarting a part that died soon after its last `quick_deaths` starts."""
        if quick_deaths <= 1:
            return 0.0 if quick_deaths == 0 else self.first_wait_s
        return min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(quick_deaths - 1, 32))


@dataclass(slots=True, kw_only=True)
class Child:
    """The state of one part."""

    part: Part
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    proven: bool = False  # it was ready or steady once, so a death is no longer a failure to start
    failure: str | None = None  # why it is not started again
    waits_for_person: bool = False  # a person has to look at the part, and the others go on without it
    since_ms: int = 0  # when its present state began, since the epoch, UTC

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.returncode is None

    def state(self) -> PartState:
        """Return what other commands may know of it."""
        pid = self.process.pid if self.process is not None and self.running else None
        return PartState(
            name=self.part.name, pid=pid, restarts=self.restarts, since_ms=self.since_ms, failure=self.failure
        )


class Supervisor:
    """Keeps parts running from `__aenter__` to `__aexit__`, and parts.json in `folder` up to date.

    Parts started last are stopped first, and parts started together are stopped together: the gateway ends its streams
    while the engine still runs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        patience: Patience | None = None,
        now_ms: Callable[[], int] = now_ms,
    ) -> None:
        self._folder = folder
        self._environment = dict(environment)
        self._say = say
        self._patience = patience or Patience()
        self._now_ms = now_ms
        self._groups: list[list[Child]] = []  # the parts that were started together, in order
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.children: dict[str, Child] = {}
        self.failed = asyncio.Event()
        self._failure: str | None = None

    async def __aenter__(self) -> "Supervisor":
        self.log_of("any").parent.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, parts: Sequence[Part]) -> None:
        """Start all of `parts` at once and return when each is ready, or has stopped for a person to look.

        Raises PartUnavailable, with the end of the part's log, for a part that can't be started or does not get ready.
        """
        children = [Child(part=part) for part in parts]
        self.children |= {child.part.name: child for child in children}
        self._groups.append(children)
        self._tasks |= {child.part.name: asyncio.create_task(self._keep(child)) for child in children}
        waits = [asyncio.create_task(self._ready(child)) for child in children]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self) -> None:
        """End all parts; return when they are gone."""
        for group in reversed(self._groups):
            await asyncio.gather(*(self.stop_part(child.part.name) for child in group))

    async def stop_part(self, name: str) -> None:
        """End one part for good; return when it and everything left in its process group are gone."""
        task = self._tasks[name]
        task.cancel()
        await asyncio.wait([task])
        child = self.children[name]
        if child.running:
            await self._end(child)
            self._note(child)

    def failure(self) -> str:
        """Return the error that names the failed part and the reason; call it once `failed` is set."""
        assert self._failure is not None, "nothing has failed"
        return self._failure

    def log_of(self, name: str) -> Path:
        """The part's log file."""
        return self._folder / "logs" / f"{name}.log"

    async def _keep(self, child: Child) -> None:
        quick_deaths = 0
        while True:
            started = time.monotonic()
            try:
                code = await self._run(child)
            except OSError as error:
                self._give_up(child, f"can't be started ({error})")
                return
            if code == TooManyFailures.exit_status:
                self._leave_down(child, f"exited with {code} and stays down until a person has looked")
                return
            steady = time.monotonic() - started >= self._patience.steady_after_s
            child.proven = child.proven or steady
            quick_deaths = 0 if steady else quick_deaths + 1
            if not child.proven and quick_deaths >= self._patience.start_tries:
                self._give_up(child, f"exited with {code} {quick_deaths} times before it did its work")
                return
            child.restarts += 1
            self._note(child)
            self._say(f"{child.part.name} exited with {code}: restarting it (log: {self.log_of(child.part.name)})")
            await asyncio.sleep(self._patience.restart_wait_s(max(quick_deaths - 1, 0)))

    async def _run(self, child: Child) -> int:
        part = child.part
        process = await start_child(part.command, log=self.log_of(part.name), environment=self._environment)
        child.process = process
        self._note(child)
        log.info("part_started part=%s pid=%d", part.name, process.pid)
        code = await process.wait()
        kill_group(process.pid)
        return code

    async def _ready(self, child: Child) -> None:
        part, within_s = child.part, self._patience.ready_within_s
        started = time.monotonic()
        missing, said = None, None
        while child.failure is None and time.monotonic() < started + within_s:
            if child.running:
                missing = await part.missing() if part.missing is not None else None
                if missing is None:
                    child.proven = child.proven or part.missing is not None
                    return
                if missing != said and time.monotonic() > started + self._patience.silent_s:
                    self._say(f"{part.name} is not ready yet: {missing}")
                    said = missing
            await asyncio.sleep(LOOK_EVERY_S)
        if child.waits_for_person:
            return
        why = "" if missing is None else f" ({missing})"
        raise PartUnavailable(self._words_on(child, child.failure or f"was not ready within {within_s:g} s{why}"))

    async def _end(self, child: Child) -> None:
        process = child.process
        assert process is not None
        if not await end_child(process, self._patience.stop_within_s):
            log.warning("part_killed part=%s pid=%d", child.part.name, process.pid)

    def _give_up(self, child: Child, reason: str) -> None:
        child.failure = reason
        self._note(child)
        self._failure = self._words_on(child, reason)
        self.failed.set()  # what waits for it ends all

    def _leave_down(self, child: Child, reason: str) -> None:
        child.failure, child.waits_for_person = reason, True
        self._note(child)
        self._say(self._words_on(child, reason))

    def _note(self, child: Child) -> None:
        child.since_ms = self._now_ms()
        try:
            write_parts(self._folder, [one.state() for one in self.children.values()])
        except OSError as error:  # a full disk: parts run on, and readers see the previous state
            log.warning("parts_not_written folder=%s why=%s", self._folder, error.strerror)

    def _words_on(self, child: Child, reason: str) -> str:
        return f"{child.part.name} {reason}. The end of its log:\n{self._tail(child.part.name)}"

    def _tail(self, name: str) -> str:
        try:
            return last_lines(self.log_of(name).read_text(errors="replace"))
        except FileNotFoundError:
            return "(it has none)"


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
        await asyncio.sleep(_SERVER_LOOK_EVERY_S)
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
