"""SkyRL's Tinker server in an environment of its own, and the SDK of its time: a service that trains, on the CPU.

SkyRL 0.3 is the newest that runs on Python 3.11, and speaks to the SDK before 0.19. It imports torch, uses none of it
on a CPU, and is lent ours. The processes that speak to it find the SDK in a folder before all others.
"""

import contextlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clawstream import locks
from clawstream.local.servers import accounts
from clawstream.local.servers.server_process import ServerProcess, reserved
from tests.parts.sglang.installation import INSTALL_WITHIN_S, run
from tests.parts.sglang.process import wait_until_ready

SKYRL, SDK = "0.3.0", "0.18.2"
# What it does not have comes from the environment around it. Before Python 3.12 pydantic wants another TypedDict.
_LENT = (
    "import sys, typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict; sys.path.append({site!r})\n"
)
_NOT_AGAIN = "torch ; python_version < '3'\ntriton ; python_version < '3'\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyrlInstallation:
    """Where it is: an environment, and a folder with the SDK for other environments."""

    environment: Path
    sdk: Path
    compiled: Path  # by jax: a test that ran once starts in seconds

    @property
    def client_path(self) -> str:
        """The PYTHONPATH of processes that speak to it."""
        return os.pathsep.join(
            filter(None, (str(self.sdk), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")))
        )


def installation() -> SkyrlInstallation:
    """SkyRL and the SDK, installed below the user's cache folder if they are not there, whole (1.5 GB, a minute)."""
    folder = accounts.cache_folder() / f"skyrl-{SKYRL}"
    folder.mkdir(parents=True, exist_ok=True)
    found = SkyrlInstallation(environment=folder / "venv", sdk=folder / "sdk", compiled=folder / "compiled")
    whole = folder / "whole"
    with locks.locked(folder.with_suffix(".lock"), within_s=INSTALL_WITHIN_S):
        if whole.exists():
            return found
        for part in (found.environment, found.sdk):
            shutil.rmtree(part, ignore_errors=True)
        print(f"tests: installing SkyRL {SKYRL} into {folder} (1.5 GB, once)", file=sys.stderr, flush=True)
        uv = ("uv",) if shutil.which("uv") else (sys.executable, "-m", "uv")
        without = folder / "without.txt"
        without.write_text(_NOT_AGAIN)
        python = found.environment / "bin" / "python"
        run((*uv, "venv", "-q", "--python", "3.11", str(found.environment)))
        run((
            *uv, "pip", "install", "-q", "--python", str(python), "--override", str(without),
            f"skyrl[tinker,jax]=={SKYRL}", f"tinker=={SDK}", "aiohttp",
        ))  # fmt: skip
        site = Path(run((str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")).strip())
        (site / "lent.pth").write_text(_LENT.format(site=sysconfig.get_paths()["purelib"]))
        needed = ("h2", "hpack", "hyperframe", "sniffio", "distro", "zstandard", "protobuf", "httpx-aiohttp")
        run((*uv, "pip", "install", "-q", "--no-deps", "--target", str(found.sdk), f"tinker=={SDK}", *needed))
        whole.touch()
    return found


@contextlib.contextmanager
def service(base: Path, folder: Path, *, port: int | None = None) -> Iterator[str]:
    """A server with that base; yield its URL. Its states lie in `folder`, where the next server finds them."""
    with contextlib.ExitStack() as stack:
        at = port or stack.enter_context(reserved())
        server = started(base, folder, at)
        try:
            wait_until_ready(server, at, "SkyRL", page="/api/v1/healthz")
            yield f"http://127.0.0.1:{at}"
        finally:
            server.stop()


def started(base: Path, folder: Path, port: int) -> ServerProcess:
    """A server that may not be ready yet. It asks for `uv run` as its parent, and starts its engine the same way."""
    installed = installation()
    folder.mkdir(parents=True, exist_ok=True)
    uv = shutil.which("uv") or "uv"
    command = [
        "env", f"VIRTUAL_ENV={installed.environment}", "JAX_PLATFORMS=cpu",
        f"JAX_COMPILATION_CACHE_DIR={installed.compiled}", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.2",
        uv, "run", "--active", "--no-project", "python", "-m", "skyrl.tinker.api", "--base-model", str(base),
        "--backend-config", '{"max_lora_adapters": 8, "max_lora_rank": 32, "sample_max_num_sequences": 8}',
        "--host", "127.0.0.1", "--port", str(port), "--checkpoints-base", str(folder / "states"),
        "--database-url", f"sqlite:///{folder / 'service.db'}",
    ]  # fmt: skip
    return ServerProcess(command, folder=folder, log=folder / "skyrl.log", grace_s=10.0)


def environment() -> dict[str, str]:
    """The environment of processes that speak to it."""
    return os.environ | {"PYTHONPATH": installation().client_path}
