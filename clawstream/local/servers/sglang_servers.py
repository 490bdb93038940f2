"""The SGLang servers of one machine: which GPUs each has, how it is started, and the settings of such an installation.

The actor trains, the rollout engines serve, the judges judge. The counts and their order are those that users of
OpenClaw-RL know: the first GPUs are the actor's, then the rollout's, then the judges' (its PRM). `deploy/gpus.sh` is
the same rule for `deploy/compose.yaml`. Of one GPU alone the trainer and an engine each have a share.
"""

from dataclasses import dataclass
from math import floor
from pathlib import Path

from pydantic import SecretStr

from clawstream.config import Settings
from clawstream.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCounts:
    """How many GPUs there are, and how many each role gets."""

    machine: int
    actor: int
    rollout: int
    judge: int

    @property
    def side_by_side(self) -> bool:
        """Whether trainer and engine have one GPU together."""
        return self.machine == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """GPUs by number: the actor's, each engine's, and the judge server's."""

    actor: tuple[int, ...]
    rollout: tuple[tuple[int, ...], ...]
    judge: tuple[int, ...]


def share_out(machine: int, actor: int | None, rollout: int | None, judge: int | None) -> GpuCounts:
    """Return the counts, with halves and quarters for the unset ones: 8 GPUs become 4, 2 and 2.

    The judge gets no more than the others leave, which may be nothing. A single GPU is the actor's and the rollout's.
    Raises ConfigError where they don't fit.
    """
    if machine == (actor or 1) == (rollout or 1) == 1 and not judge:
        return GpuCounts(machine=1, actor=1, rollout=1, judge=0)
    quarter = max(1, machine // 4)
    trains = max(1, machine // 2) if actor is None else actor
    serves = quarter if rollout is None else rollout
    left = max(0, machine - trains - serves)
    counts = GpuCounts(
        machine=machine, actor=trains, rollout=serves, judge=min(quarter, left) if judge is None else judge
    )
    wanted = counts.actor + counts.rollout + counts.judge
    if wanted > machine:
        raise ConfigError(
            f"ACTOR_GPUS + ROLLOUT_GPUS + PRM_GPUS is {counts.actor} + {counts.rollout} + {counts.judge} = {wanted}; "
            f"NUM_GPUS is {machine}. Lower one (PRM_GPUS=0: judges elsewhere, by judge.url). Nothing was started"
        )
    return counts


def assign(counts: GpuCounts, *, rollout_tp: int, judge_tp: int) -> Assignment:
    """Return which GPUs each role has: engines of `rollout_tp` each, one judge server of replicas of `judge_tp` each.

    Raises ConfigError where such a size does not divide the role's number of GPUs.
    """
    _check(counts.rollout, rollout_tp, "ROLLOUT_GPUS", "TP")
    _check(counts.judge, judge_tp, "PRM_GPUS", "PRM_TP")
    if counts.side_by_side:
        return Assignment(actor=(0,), rollout=((0,),), judge=())
    numbers = iter(range(counts.machine))

    def take(count: int) -> tuple[int, ...]:
        return tuple(next(numbers) for _ in range(count))

    actor = take(counts.actor)
    return Assignment(
        actor=actor,
        rollout=tuple(take(rollout_tp) for _ in range(counts.rollout // rollout_tp)),
        judge=take(counts.judge),
    )


def _check(count: int, tp: int, role: str, dial: str) -> None:
    if count % tp:
        raise ConfigError(
            f"{role} is {count} and {dial} is {tp}: a model takes {tp} GPUs, so {count} can't be shared out. "
            f"Choose a {dial} that divides it. Nothing was started"
        )


_JUDGE_PORT = 30001
# With these, chunks carry only new tokens, and no step is in flight while weights change: its token would be sampled
# by the old weights and labelled with the new version (SGLang 0.5.23).
FLAGS = ("--incremental-streaming-output", "--disable-overlap-schedule")
# An engine that starts without an adapter has to be told which it will get (SGLang 0.5.23).
_ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ONE_POLICY = ("--max-loras-per-batch", "4", "--max-loaded-loras", "4")  # a policy's newest three, and none
_MANY_POLICIES = ("--max-loras-per-batch", "8", "--max-loaded-loras", "67")  # 32 keys, each with two at most
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
    adapter_flags: tuple[str, ...] = ()  # of the policy's engines
    memory_share: float | None = None  # of a GPU, for an engine's weights and cache; None: SGLang takes most of it


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
        _server(
            launch, f"engine-{number}", gpus, first_port + number, launch.model_path, launch.rollout_tp,
            *FLAGS, *launch.adapter_flags, *memory_flags(launch.memory_share),
        )
        for number, gpus in enumerate(assignment.rollout)
    ]  # fmt: skip
    if not assignment.judge:
        return tuple(engines)
    tp, name = launch.judge_tp, launch.judge_path.name
    more = ("--dp-size", str(len(assignment.judge) // tp), "--served-model-name", name)
    return (*engines, _server(launch, "judge", assignment.judge, _JUDGE_PORT, launch.judge_path, tp, *more))


def adapter_flags(settings: Settings) -> tuple[str, ...]:
    """Return the options with which an engine can load the adapters that these settings train; none: it trains none."""
    rank = settings.training.lora_rank
    if rank is None:
        return ()
    many = _ONE_POLICY if settings.policy.adapters == "shared" else _MANY_POLICIES
    return ("--enable-lora", "--max-lora-rank", str(rank), "--lora-target-modules", *_ADAPTED, *many)


def memory_flags(share: float | None) -> tuple[str, ...]:
    """Return the options with which an engine's weights and cache take this share of a GPU; None: none."""
    return () if share is None else ("--mem-fraction-static", f"{floor(100 * share) / 100:.2f}")


def settings_for(launch: Launch, settings: Settings) -> Settings:
    """Return the settings with the servers' addresses, and with the values that the launch overrides.

    Where the settings don't say `training.processes`, there is one for each of the actor's GPUs.
    """
    gateway: dict[str, object] = {}
    if launch.port is not None:
        gateway["port"] = launch.port
    if launch.api_key is not None:
        gateway["api_key"] = SecretStr(launch.api_key)
    urls = {server.name: server.url for server in servers(launch, settings.engine.port)}
    judge_url = urls.pop("judge", None)
    judge = {} if judge_url is None else {"url": f"{judge_url}/v1", "model": launch.judge_path.name}
    training: dict[str, object] = {} if launch.save_dir is None else {"save_dir": launch.save_dir.absolute()}
    if "processes" not in settings.training.model_fields_set:
        training["processes"] = len(launch.assignment.actor)
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
