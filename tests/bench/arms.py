"""The gateways that are compared, each as its users run it, on one core: what starts it and what it speaks."""

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import yaml

from clawstream.local.servers import accounts
from clawstream.local.servers.server_process import reserved
from tests.bench.processes import LOAD_CORE, fetched, started

MODEL = "policy"
_LOAD = Path(__file__).parent / "load"
_CHAT = "/v1/chat/completions"
_OPENAI = "OpenAI chat SSE with log-probs, upstream and downstream"
_TENSORZERO = """
import os, sys, time
from tensorzero.tensorzero import _start_http_gateway
gateway = _start_http_gateway(
    config_file=sys.argv[1], clickhouse_url=None, postgres_url=None, valkey_url=None, async_setup=False
)
open(sys.argv[2] + ".new", "w").write(gateway.base_url)
os.replace(sys.argv[2] + ".new", sys.argv[2])
while True:
    time.sleep(3600)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A gateway that listens; `pid` None: there is none, the load asks the mock engine."""

    url: str  # of chat completions
    dialect: str
    model: str = MODEL
    logprobs: bool = True  # asked for by the client
    pid: int | None = None
    metrics_url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What every arm is started with."""

    folder: Path  # for this run
    mock_url: str
    bootstrap: str  # of Kafka
    model_path: Path  # a folder with a tokenizer


@contextlib.contextmanager
def direct(place: Place) -> Iterator[Arm]:
    """The mock engine itself."""
    yield Arm(url=place.mock_url + _CHAT, dialect="OpenAI chat SSE with log-probs")


@contextlib.contextmanager
def clawstream(place: Place) -> Iterator[Arm]:
    """Our gateway, its exchanges acknowledged by a real Kafka before an answer ends."""
    settings = place.folder / "clawstream.json"
    with reserved() as port:
        written = {
            "environment": False,
            "kafka": {"bootstrap": place.bootstrap},
            "engine": {"urls": [place.mock_url], "model_path": str(place.model_path)},
            "gateway": {"port": port, "default_temperature": 1.0},
            "policy": {"renderer": "qwen3", "enable_thinking": False, "served_model": MODEL},
        }
        settings.write_text(json.dumps(written))
        command = [sys.executable, "-m", "clawstream", "--config", str(settings), "gateway"]
        url = f"http://127.0.0.1:{port}"
        log = place.folder / "clawstream.log"
        with started(command, log=log, ready=lambda: fetched(f"{url}/readyz") is not None) as pid:
            yield Arm(
                url=url + _CHAT,
                dialect="OpenAI chat SSE downstream, without log-probs (it takes them for itself); upstream SGLang's "
                "/generate SSE with ids, log-probs and weight versions; renders, tokenises and records",
                logprobs=False,
                pid=pid,
                metrics_url=f"{url}/metrics",
            )


@contextlib.contextmanager
def litellm(place: Place) -> Iterator[Arm]:
    """LiteLLM's proxy with one worker and nothing switched on."""
    config = place.folder / "litellm.yaml"
    upstream = {"model": f"openai/{MODEL}", "api_base": f"{place.mock_url}/v1", "api_key": "none"}
    config.write_text(yaml.safe_dump({"model_list": [{"model_name": MODEL, "litellm_params": upstream}]}))
    environment = {
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    with reserved() as port:
        command = [
            str(installed("litellm", "litellm[proxy]") / "litellm"),
            "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1",
        ]  # fmt: skip
        url, log = f"http://127.0.0.1:{port}{_CHAT}", place.folder / "litellm.log"
        with started(command, log=log, ready=_answers(url, MODEL), environment=environment) as pid:
            yield Arm(url=url, dialect=_OPENAI, pid=pid)


@contextlib.contextmanager
def tensorzero(place: Place) -> Iterator[Arm]:
    """TensorZero's gateway, which its Python wheel carries, with its observability off."""
    config, address = place.folder / "tensorzero.toml", place.folder / "tensorzero.address"
    config.write_text(
        "[gateway]\nobservability.enabled = false\n"
        f'[models.{MODEL}]\nrouting = ["mock"]\n'
        f'[models.{MODEL}.providers.mock]\ntype = "openai"\nmodel_name = "{MODEL}"\n'
        f'api_base = "{place.mock_url}/v1/"\napi_key_location = "none"\n'
    )
    python = installed("tensorzero", "tensorzero") / "python"
    command = [str(python), "-c", _TENSORZERO, str(config), str(address)]
    model = f"tensorzero::model_name::{MODEL}"
    with started(command, log=place.folder / "tensorzero.log", ready=address.exists) as pid:
        url = address.read_text().rstrip("/") + "/chat/completions"
        assert _answers(url, model)(), f"tensorzero does not answer at {url}: see {place.folder}"
        yield Arm(url=url, dialect=_OPENAI, model=model, pid=pid)


@contextlib.contextmanager
def buffering(place: Place) -> Iterator[Arm]:
    """A proxy in OpenClaw-RL's pattern."""
    with reserved() as port:
        command = [sys.executable, "-m", "tests.bench.buffering", place.mock_url, str(port)]
        url, log = f"http://127.0.0.1:{port}{_CHAT}", place.folder / "buffering.log"
        with started(command, log=log, ready=_answers(url, MODEL)) as pid:
            yield Arm(url=url, dialect="OpenAI chat with log-probs: whole upstream, two chunks downstream", pid=pid)


ARMS: Mapping[str, Callable[[Place], AbstractContextManager[Arm]]] = {
    start.__name__: start for start in (direct, clawstream, litellm, tensorzero, buffering)
}


def load_program() -> Path:
    """Return the compiled mock engine and load generator, built again where its source has changed."""
    source = b"".join(path.read_bytes() for path in sorted(_LOAD.iterdir()))
    program = _cache() / f"load-{hashlib.sha256(source).hexdigest()[:12]}"
    if not program.exists():
        go = shutil.which("go")
        if go is None:
            raise RuntimeError("`go` is not on PATH; the bench's load generator is written in Go. Install Go 1.22")
        subprocess.run([go, "build", "-o", str(program), "."], cwd=_LOAD, check=True, timeout=300)
    return program


@contextlib.contextmanager
def mock_engine(program: Path, vocabulary: Path, folder: Path) -> Iterator[str]:
    """Yield the URL of a mock engine on the load's core."""
    with reserved() as port:
        url = f"http://127.0.0.1:{port}"
        command = [str(program), "mock", str(vocabulary), "--port", str(port)]
        ready = lambda: fetched(f"{url}/health") is not None  # noqa: E731
        with started(command, log=folder / "mock.log", ready=ready, core=LOAD_CORE):
            yield url


def installed(name: str, *packages: str) -> Path:
    """Return the folder of programs of an environment that holds `packages` from PyPI, and nothing of ours."""
    environment = _cache() / name
    if not (environment / "installed").exists():
        uv = shutil.which("uv")
        if uv is None:
            raise RuntimeError(f"`uv` is not on PATH; {name} is installed with it. Install uv")
        python = str(environment / "bin" / "python")
        for command in (
            [uv, "venv", "--quiet", "--clear", "--python", "3.11", str(environment)],
            [uv, "pip", "install", "--quiet", "--python", python, *packages],
        ):
            subprocess.run(command, check=True, timeout=900, stdout=sys.stderr)
        (environment / "installed").touch()
    return environment / "bin"


def _cache() -> Path:
    folder = accounts.cache_folder() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _answers(url: str, model: str) -> Callable[[], bool]:
    body: dict[str, object] = {"model": model, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1}
    return lambda: fetched(url, body=json.dumps(body).encode()) is not None
