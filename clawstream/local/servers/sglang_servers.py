"""The SGLang servers of one machine: how each is started, and the settings of an installation that uses them."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from clawstream.config import Settings
from clawstream.local.gpus import Assignment

_JUDGE_PORT = 30001
# With these, chunks carry only new tokens, and no step is in flight while weights change: its token would be sampled
# by the old weights and labelled with the new version (SGLang 0.5.23).
FLAGS = ("--incremental-streaming-output", "--disable-overlap-schedule")
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The servers to run; None: as the settings say."""

    assignment: Assignment
    sglang: tuple[str, ...]  # the command that starts a server
    model_path: Path
    judge_path: Path
    rollout_tp: int
    judge_tp: int
    save_dir: Path | None
    api_key: str | None
    port: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangServer:
    """One server: its name among the parts, its command line and its address."""

    name: str
    command: tuple[str, ...]
    url: str


def servers(launch: Launch, first_port: int) -> tuple[SglangServer, ...]:
    """Return the engines of the policy, on ports from `first_port` on, then the judges' server if there is one."""
    assignment = launch.assignment
    engines = [
        _server(launch, f"engine-{number}", gpus, first_port + number, launch.model_path, launch.rollout_tp, *FLAGS)
        for number, gpus in enumerate(assignment.rollout)
    ]
    if not assignment.judge:
        return tuple(engines)
    tp, name = launch.judge_tp, launch.judge_path.name
    more = ("--dp-size", str(len(assignment.judge) // tp), "--served-model-name", name)
    return (*engines, _server(launch, "judge", assignment.judge, _JUDGE_PORT, launch.judge_path, tp, *more))


def settings_for(launch: Launch, settings: Settings) -> Settings:
    """Return the settings with the servers' addresses, and with the values that the launch overrides."""
    gateway: dict[str, object] = {}
    if launch.port is not None:
        gateway["port"] = launch.port
    if launch.api_key is not None:
        gateway["api_key"] = SecretStr(launch.api_key)
    urls = {server.name: server.url for server in servers(launch, settings.engine.port)}
    judge_url = urls.pop("judge", None)
    judge = {} if judge_url is None else {"url": f"{judge_url}/v1", "model": launch.judge_path.name}
    training = {} if launch.save_dir is None else {"save_dir": launch.save_dir.absolute()}
    engine = {"urls": tuple(urls.values()), "model_path": launch.model_path}
    return settings.model_copy(
        update={
            "engine": settings.engine.model_copy(update=engine),
            "gateway": settings.gateway.model_copy(update=gateway),
            "judge": settings.judge.model_copy(update=judge),
            "training": settings.training.model_copy(update=training),
        }
    )


def _server(
    launch: Launch, name: str, gpus: tuple[int, ...], port: int, model: Path, tp: int, *more: str
) -> SglangServer:
    command = (
        "env",
        f"CUDA_VISIBLE_DEVICES={','.join(map(str, gpus))}",
        *launch.sglang,
        *("--model-path", str(model.absolute()), "--host", _HOST, "--port", str(port), "--tp-size", str(tp)),
        *more,
    )
    return SglangServer(name=name, command=command, url=f"http://{_HOST}:{port}")
