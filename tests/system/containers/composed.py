"""deploy/compose.yaml with compose.cpu.yaml as podman-compose starts them, and what is to be seen of them from here.

podman before 4.6 waits for no condition of `depends_on`, and without systemd asks no container for its health. So here
what others wait for is started first, and `podman healthcheck run` asks, by the check that Compose gave the container.
"""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from clawstream import cli
from clawstream.errors import PartUnavailable
from tests.parts.deploy.test_deploy import DEPLOY, STAGES
from tests.system.containers import images
from tests.system.containers.podman import COMPOSE, Podman, said

SERVERS = ("kafka", "postgres")
PROFILES = {"heuristics", "refresh"}  # stages that the defaults do not need
RUNNING = (*SERVERS, "engine", "judge", *(stage for stage in STAGES if stage not in PROFILES))
UP_WITHIN_S, HEALTHY_WITHIN_S = 300.0, 300.0
KEY, PASSWORD = "key-of-clients", "password-of-the-database"


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """One project of Compose: its name, its files, and the port at which its gateway answers."""

    podman: Podman
    name: str
    folder: Path
    files: Sequence[Path]
    port: int

    @property
    def gateway(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        """Write what a person writes before the first start: passwords, and the file of variables."""
        secrets = self.folder / "secrets"
        assert CliRunner().invoke(cli.app, ["topics", "passwords", str(secrets)]).exit_code == 0
        variables = {
            "HF_CKPT": DEPLOY.parent / "clawstream" / "simulation" / "policy" / "shipped",
            "SGLANG_API_KEY": KEY, "POSTGRES_PASSWORD": PASSWORD, "KAFKA_SECRETS": secrets, "PORT": self.port,
            "COMPOSE_PROFILES": "judge", "RENDERER": "qwen3", "BATCH_SAMPLES": 4, "STAGE_MEMORY": "2g",
            "KAFKA_IMAGE": images.KAFKA, "POSTGRES_IMAGE": images.POSTGRES,
        }  # fmt: skip
        (self.folder / "my.env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))

    def compose(self, *words: str, within_s: float) -> str:
        files = [word for file in self.files for word in ("-f", str(file))]
        options = ("-p", self.name, *files, "--env-file", str(self.folder / "my.env"), "--profile", "judge")
        # Not below the checkout, whose pyproject.toml uv would read.
        command = ("uv", "tool", "run", "--quiet", "--from", COMPOSE, "podman-compose", *options, *words)
        return said(command, self.podman.environment, within_s=within_s)

    def up(self) -> None:
        """Have every service run, and healthy."""
        self._start(*SERVERS)
        self.wait_healthy(*SERVERS)
        self._start("prepare")
        self.wait(lambda: self.inspect("prepare")["State"]["Status"] == "exited", "prepared", within_s=UP_WITHIN_S)
        if self.inspect("prepare")["State"]["ExitCode"] != 0:
            raise PartUnavailable(f"prepare failed.\n{self.last_words()}")
        self._start(*(service for service in RUNNING if service not in SERVERS))
        self.wait_healthy(*(service for service in RUNNING if service not in SERVERS))

    def _start(self, *services: str) -> None:
        self.compose("up", "-d", "--no-build", "--no-deps", *services, within_s=UP_WITHIN_S)

    def down(self, *words: str) -> None:
        self.compose("down", *words, within_s=UP_WITHIN_S)

    def container(self, service: str) -> str:
        return f"{self.name}_{service}_1"

    def inspect(self, service: str) -> dict[str, Any]:
        [found] = json.loads(self.podman.run("inspect", self.container(service)))
        return dict(found)

    def execute(self, service: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self.podman.ran("exec", self.container(service), *words)

    def python(self, service: str, code: str) -> str:
        """Return what `code` prints in the container of one of our services."""
        done = self.execute(service, "python", "-c", code)
        assert done.returncode == 0, f"{service}: {done.stderr}"
        return done.stdout.strip()

    def sql(self, query: str) -> list[dict[str, Any]]:
        """Return the rows of a query, as the stage that owns the database reads them."""
        done = self.execute("project", "clawstream", "sql", "--json", query)
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout))

    def served_version(self) -> int:
        """Return the version that the engine says it serves, asked from where the gateway asks it."""
        page = "http://engine:30010/get_model_info"
        code = f"import json, urllib.request as u; print(json.load(u.urlopen({page!r}))['weight_version'])"
        return int(self.python("gateway", code))

    def wait_healthy(self, *services: str) -> None:
        for service in services:
            self.wait(partial(self._is_healthy, service), f"{service} healthy", within_s=HEALTHY_WITHIN_S)

    def _is_healthy(self, service: str) -> bool:
        return self.podman.ran("healthcheck", "run", self.container(service)).returncode == 0

    def wait(self, holds: Callable[[], bool], what: str, *, within_s: float) -> None:
        """Return once it holds; raises PartUnavailable with the last words of every container."""
        deadline = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > deadline:
                raise PartUnavailable(f"not {what} within {within_s:g} s.\n{self.last_words()}")
            time.sleep(0.2)

    def last_words(self) -> str:
        logs = {
            service: self.podman.ran("logs", "--tail=15", self.container(service)) for service in ("prepare", *RUNNING)
        }
        return "\n".join(f"--- {service}\n{log.stdout}{log.stderr}" for service, log in logs.items())
