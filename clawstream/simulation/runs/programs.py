"""The processes that simulate people: students who chat and the scorer, started, steered and read from here."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from clawstream.errors import PartUnavailable
from clawstream.local.servers.server_process import die_with_parent
from clawstream.simulation.runs.figures import Chat, VersionScore

PAUSE_WITHIN_S = 120.0


@contextlib.asynccontextmanager
async def program(*argv: str, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A simulated person as a process, with its words in `log`; it is gone when the block ends, or this process."""
    with log.open("ab") as words:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *argv,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=words, limit=2**22,
            preexec_fn=die_with_parent,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 10)
        if process.returncode is None:
            process.kill()
            await process.wait()


class StudentProcess:
    """The student process: told to pause and go on over its stdin, heard line by line on its stdout."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._paused = asyncio.Event()
        self.chats: list[Chat] = []

    async def listen(self) -> None:
        """Collect its reports until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            report = json.loads(line)
            if report["event"] == "paused":
                self._paused.set()
            else:
                self.chats.append(_chat(report))

    async def pause(self) -> None:
        """Return once no session is open; raise PartUnavailable when the process does not say so in time."""
        await self._all_said("pause")

    async def go(self) -> None:
        """Let sessions start again."""
        await self._tell("go")

    async def flip(self) -> None:
        """Let each want what another wanted, in all sessions that start from now on."""
        await self._tell("flip")

    async def hold(self, num_sessions: int) -> None:
        """Let so many sessions start, and return once they are over; raises what `pause` does."""
        await self._all_said(f"go {num_sessions}")

    async def _all_said(self, command: str) -> None:
        self._paused.clear()
        await self._tell(command)
        num_answers = -1
        while not self._paused.is_set():
            if num_answers == len(self.chats):
                raise PartUnavailable(
                    f"the students did not pause, and got no answer for {PAUSE_WITHIN_S:.0f} s (exit code "
                    f"{self._process.returncode}): see student.log in the logs folder of this run"
                )
            num_answers = len(self.chats)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._paused.wait(), PAUSE_WITHIN_S)

    async def _tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        await self._process.stdin.drain()


def _chat(report: dict[str, Any]) -> Chat:
    started_ms = report["started_at_s"] * 1000
    return Chat(
        started_at_ms=started_ms,
        finished_at_ms=started_ms + report["total_ms"],
        ttft_ms=report["ttft_ms"],
        gaps=tuple((ended_at_s * 1000, gap_ms) for ended_at_s, gap_ms in report["gaps"]),
        failed=report["failed"],
        first_answer=report["first_answer"],
        num_tokens=report["num_chunks"],
    )


class ScorerProcess:
    """The scoring process; every call is one run of it."""

    def __init__(
        self, gateway: str, problems_file: Path, logs: Path, *, module: str, seed: int, temperature: float,
        max_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self._gateway, self._module = gateway, module
        self._problems = problems_file
        self._log = logs / "scorer.log"
        self._seed, self._temperature = seed, temperature
        self._limit = () if max_tokens is None else ("--max-tokens", str(max_tokens))

    async def score(self, update: int, *, hinted: bool = False) -> VersionScore:
        """Ask all held-out problems; raise PartUnavailable when some answer did not come or versions were mixed."""
        argv = [
            self._module, "--base-url", f"{self._gateway}/v1", "--problems", str(self._problems),
            "--seed", str(self._seed), "--temperature", str(self._temperature), *self._limit,
            *(("--hinted",) if hinted else ()),
        ]  # fmt: skip
        async with program(*argv, log=self._log) as process:
            output, _ = await process.communicate()
        if process.returncode != 0:
            raise PartUnavailable(f"the scorer exited with {process.returncode}: see {self._log}")
        found = json.loads(output)
        if found["policy_versions"] != [str(update)]:
            raise PartUnavailable(
                f"answers for the score of update {update} came from versions {found['policy_versions']}: "
                "a score is of one version, so the run ends here"
            )
        return VersionScore(
            update=update, score=found["score"], low=found["ci95_low"], high=found["ci95_high"],
            num_problems=found["n"], num_right=found["right"], num_styled=found.get("styled"),
            by_persona=found.get("by_persona"),
        )  # fmt: skip
