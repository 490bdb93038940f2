"""The real OpenClaw, from npm, in a home of its own."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clawstream import locks
from clawstream.local.servers import accounts
from clawstream.local.servers.server_process import die_with_parent, reserved

VERSION = "2026.9.6"
NODE = "24"
INSTALL_WITHIN_S = 900.0
READY_WITHIN_S = 120.0
ANSWER_WITHIN_S = 120.0
_STOP_WITHIN_S = 20.0


def openclaw_installation() -> Path:
    """The folder with OpenClaw and its Node, installed below the user's cache if it is not there (770 MB)."""
    folder = accounts.cache_folder() / f"openclaw-{VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    package = folder / "node_modules" / "openclaw" / "package.json"
    partial = folder / "partial"  # while it is here, whatever lies beside it was not finished
    with locks.locked(folder.with_suffix(".lock"), within_s=INSTALL_WITHIN_S):
        if partial.exists() or not (package.is_file() and json.loads(package.read_text())["version"] == VERSION):
            partial.touch()
            shutil.rmtree(folder / "node_modules", ignore_errors=True)
            print(f"tests: installing OpenClaw {VERSION} into {folder} (770 MB, once)", file=sys.stderr, flush=True)
            # Node first: OpenClaw refuses to be installed by an older one.
            for name in (f"node@{NODE}", f"openclaw@{VERSION}"):
                npm = ("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), name)
                subprocess.run(npm, check=True, cwd=folder, env=_on_path(folder), timeout=INSTALL_WITHIN_S)
            partial.unlink()
    return folder


def _on_path(folder: Path) -> dict[str, str]:
    return dict(os.environ) | {"PATH": f"{folder / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the command line printed."""

    text: str
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenClaw:
    """An OpenClaw whose home is `home`; its own gateway listens on `port`."""

    folder: Path
    home: Path
    port: int

    @property
    def environment(self) -> dict[str, str]:
        """Of each of its processes; nothing of a person's own OpenClaw."""
        own = {name: value for name, value in _on_path(self.folder).items() if not name.startswith("OPENCLAW_")}
        return own | {"HOME": str(self.home), "OPENCLAW_HOME": str(self.home), "OPENCLAW_OFFLINE": "1"}

    @property
    def config(self) -> Path:
        """Where it finds its configuration."""
        return self.home / ".openclaw" / "openclaw.json"

    async def say(self, session_id: str, text: str, *, timeout_s: int | None = None) -> Reply:
        """Say something in a session; return the answer as a person sees it."""
        message = self.home / "message.txt"
        message.write_text(text)
        limit = () if timeout_s is None else ("--timeout", str(timeout_s))
        return await self.run("agent", "--session-id", session_id, "--message-file", str(message), *limit)

    async def run(self, *arguments: str) -> Reply:
        """Run a command of its command line."""
        process = await asyncio.create_subprocess_exec(
            "openclaw",
            *arguments,
            env=self.environment,
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                raw, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return Reply(text=re.sub(r"\x1b\[\d+m", "", raw.decode()).strip(), exit_code=process.returncode)

    @contextmanager
    def gateway(self) -> Iterator[None]:
        """Its own gateway, which runs the agents, for the length of the block.

        It gives up where a step of its start takes longer than 5 s, as on a machine that is busy: then it is started
        again.
        """
        end = time.monotonic() + READY_WITHIN_S
        process = self._start()
        try:
            while not self._listens():
                if time.monotonic() > end:
                    raise AssertionError(
                        f"OpenClaw's gateway does not listen:\n{self._log.read_text(errors='replace')}"
                    )
                if process.poll() is not None:
                    process = self._start()
                time.sleep(0.1)
            yield
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @property
    def _log(self) -> Path:
        return self.home / "openclaw.log"

    def _listens(self) -> bool:
        return "http server listening" in self._log.read_text(errors="replace")

    def _start(self) -> "subprocess.Popen[bytes]":
        command = ("openclaw", "gateway", "run", "--auth", "none", "--bind", "loopback", "--port", str(self.port))
        with self._log.open("wb") as output:
            return subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )


@contextmanager
def openclaw(home: Path) -> Iterator[OpenClaw]:
    """An OpenClaw in an empty home, not configured yet."""
    with reserved() as port:
        found = OpenClaw(folder=openclaw_installation(), home=home, port=port)
        found.config.parent.mkdir(parents=True)
        yield found
