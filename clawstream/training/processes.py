"""The processes of a trainer: how they are started, asked and ended, and which part of a tensor each copy keeps.

All processes are asked the same thing, one thing at a time. If one ends, their common work is lost, so all are ended.
Processes that hold copies of a model divide AdamW's moments: AdamW moves each number by itself, so it may be given any
part of a tensor. A part is a flat view of the whole tensor; the last parts may be shorter, or empty.
"""

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional

from clawstream.config import TrainingSettings, stay_on_this_machine
from clawstream.errors import ConfigError, OperatorError, PartUnavailable, StepRefused
from clawstream.events import SampleAssembled
from clawstream.inference.model_folder import INDEX
from clawstream.training.base_folder import threads_for
from clawstream.training.model import Model
from clawstream.training.step.trainer import StepSummary, Trainer, load_options

JOIN_S = 10.0
LOST_WITHIN_S = 2.0  # after one process' error, how long to look for another that ended and caused it
# After so long a wait a process takes another for lost. In one step no two processes differ by as much.
PATIENCE_S = 600.0
_PR_SET_PDEATHSIG = 1  # prctl(2)
_MEMBER = "clawstream.training.processes"


def part(whole: Tensor, copies: dist.ProcessGroup) -> Tensor:
    """Return the part [n] of a contiguous tensor that this copy keeps, as a view."""
    size = _size(whole.numel(), copies)
    return whole.view(-1)[copies.rank() * size : (copies.rank() + 1) * size]


def spread(whole: Tensor, copies: dist.ProcessGroup) -> None:
    """Fill every copy's tensor with the parts that the other copies keep."""
    if copies.size() == 1:
        return
    mine = _padded(part(whole, copies), whole.numel(), copies)
    everyone = mine.new_empty(mine.numel() * copies.size())
    dist.all_gather_into_tensor(everyone, mine, group=copies)
    whole.copy_(everyone[: whole.numel()].view_as(whole))


def gathered(mine: Tensor, shape: torch.Size, copies: dist.ProcessGroup, rank: int) -> Tensor | None:
    """Return the whole tensor of this shape on the named copy, from all copies' parts; None on the others."""
    padded = _padded(mine, shape.numel(), copies)
    parts = [torch.empty_like(padded) for _ in range(copies.size())] if copies.rank() == rank else None
    dist.gather(padded, parts, dst=dist.get_global_rank(copies, rank), group=copies)
    return None if parts is None else torch.cat(parts)[: shape.numel()].view(shape)


def _size(numbers: int, copies: dist.ProcessGroup) -> int:
    return -(-numbers // copies.size())


def _padded(mine: Tensor, numbers: int, copies: dist.ProcessGroup) -> Tensor:
    return functional.pad(mine, (0, _size(numbers, copies) - mine.numel()))


def write_parts(folder: Path, stem: str, mine: Mapping[str, Tensor]) -> None:
    """Write this process' tensors, which are in main memory, to a numbered file; all processes call this together.

    If `stem` is "model", the first process also writes the index by which engines find each tensor.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    file = f"{stem}-{rank + 1:05d}-of-{count:05d}.safetensors"
    if mine:
        save_file({name: value.contiguous() for name, value in mine.items()}, folder / file, metadata={"format": "pt"})
    listed: list[list[str]] = [[] for _ in range(count)]
    dist.all_gather_object(listed, [file, *mine])
    if rank == 0 and stem == "model":
        file_of = {name: names[0] for names in listed for name in names[1:]}
        size = sum((folder / part).stat().st_size for part in set(file_of.values()))
        body = {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX).write_text(json.dumps(body, indent=1))
    dist.barrier()


def begin(state: dict[str, Any], base: Path, settings: TrainingSettings, device: str) -> None:
    """Make the trainer, with this process' part of the base's model."""
    state["trainer"] = Trainer(base, settings, device=device, model=_model(base, settings, device))


def call(state: dict[str, Any], method: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Call the trainer's method; all processes return the same. A refusal is returned, so that the processes go on."""
    try:
        return getattr(state["trainer"], method)(*args, **options)
    except StepRefused as why:
        return why


def _model(base: Path, settings: TrainingSettings, device: str) -> Model:
    options = load_options(settings, device)
    if settings.trainer == "torch":
        from clawstream.training.fsdp_model import FsdpModel

        return FsdpModel.load(base, **options)
    from clawstream.training.megatron.model import MegatronModel, join
    from clawstream.training.megatron.shape import sizes_of

    sizes = sizes_of(settings)
    join(sizes)
    return MegatronModel.load(base, sizes, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How each process begins."""

    backend: str  # of torch.distributed: "gloo", "nccl"
    threads: int | None = None  # of torch; None: its own choice
    patience_s: float = PATIENCE_S
    forked: bool = False  # from a process that has imported what multiprocessing was told to preload
    around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # a module's function: it is pickled


class Processes:
    """`count` processes that know each other by torch.distributed, each with a `state` of its own."""

    def __init__(self, count: int, start: Start) -> None:
        self._store = tempfile.TemporaryDirectory(prefix="clawstream-ranks-")
        context: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
        if start.forked:
            context = multiprocessing.get_context("forkserver")
        self._members: list[tuple[BaseProcess, Connection]] = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            where = Path(self._store.name) / "store"
            process = context.Process(target=_serve, args=(theirs, rank, count, where, start), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    @property
    def pids(self) -> tuple[int, ...]:
        """Their process ids, by rank."""
        return tuple(process.pid or 0 for process, _ in self._members)

    def ask(self, work: str, *args: Any) -> list[Any]:
        """Return what `work(state, *args)` returns in each process, by rank.

        `work` is named as "module:function", which each process imports when it is first asked for it.

        Raises the error of the first process to report one, or PartUnavailable where a process ended. Then all
        processes are ended.
        """
        if not self._members:
            raise PartUnavailable("the trainer's processes have ended. Start `clawstream train` again")
        replies: dict[int, Any] = {}
        for _, connection in self._members:
            with contextlib.suppress(BrokenPipeError):  # a process that ended is found below
                connection.send((work, args))
        while len(replies) < len(self._members):
            waiting = {connection: rank for rank, (_, connection) in enumerate(self._members) if rank not in replies}
            ready = wait(list(waiting))
            for rank in (rank for connection, rank in waiting.items() if connection in ready):
                try:
                    error, value = self._members[rank][1].recv()
                except (EOFError, ConnectionResetError) as gone:
                    raise self._lost(rank) from gone
                if error is not None:
                    raise self._failed(error)
                replies[rank] = value
        return [replies[rank] for rank in sorted(replies)]

    def close(self) -> None:
        """End all of them; those that don't end by themselves within JOIN_S are killed together."""
        for _, connection in self._members:
            connection.close()
        killed_at_s = time.monotonic() + JOIN_S
        for process, _ in self._members:
            process.join(max(0.0, killed_at_s - time.monotonic()))
        for process, _ in self._members:
            process.kill()
        for process, _ in self._members:
            process.join(JOIN_S)
        self._members = []
        self._store.cleanup()

    def _failed(self, error: Exception) -> Exception:
        """End all; return the error, unless it only follows from another process' end."""
        sentinels = {process.sentinel: rank for rank, (process, _) in enumerate(self._members)}
        ended = [] if isinstance(error, OperatorError) else wait(list(sentinels), timeout=LOST_WITHIN_S)
        if ended:
            return self._lost(sentinels[ended[0]])  # type: ignore[index]  # a sentinel is what was given
        self.close()
        return error

    def _lost(self, rank: int) -> PartUnavailable:
        process, count = self._members[rank][0], len(self._members)
        process.join(JOIN_S)
        self.close()
        return PartUnavailable(
            f"process {rank} of the trainer's {count} (pid {process.pid}) ended with status {process.exitcode} in the "
            "middle of its work. The others are stopped, and the work they had begun is lost; what is published "
            "stays. Start `clawstream train` again: it goes on from the newest checkpoint. If it ends again, look "
            "for its last output above, and check whether the machine has enough memory"
        )


def _serve(connection: Connection, rank: int, count: int, store: Path, start: Start) -> None:
    """Do the work that is asked for until the connection closes."""
    for stopping in (signal.SIGINT, signal.SIGTERM):  # only the process that started this one heeds them
        signal.signal(stopping, signal.SIG_IGN)
    _end_with_parent()
    if start.threads is not None:
        torch.set_num_threads(start.threads)
    if start.backend == "nccl":
        torch.cuda.set_device(rank)
    stay_on_this_machine()
    dist.init_process_group(
        start.backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=start.patience_s),
    )
    state: dict[str, Any] = {}
    with start.around(), contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            work, args = connection.recv()
            connection.send(_answer(work, state, args))


def _end_with_parent() -> None:
    """Have the kernel end this process with the thread that started it, also in the middle of work.

    A server that forks ends with the thread that started the server.
    """
    parent = multiprocessing.parent_process()
    if sys.platform == "linux" and parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if not parent.is_alive():  # it ended before
            os._exit(1)


def _answer(work: str, state: dict[str, Any], args: Sequence[Any]) -> tuple[Exception | None, Any]:
    module, _, name = work.partition(":")
    try:
        return None, getattr(importlib.import_module(module), name)(state, *args)
    except OperatorError as error:
        return error, None
    except Exception:  # noqa: BLE001  # any error goes to the starting process, which raises it
        return RuntimeError(traceback.format_exc()), None


class Team:
    """The processes of a trainer; each holds a part of the policy, its moments and its reference.

    All methods raise PartUnavailable where a process ended; then all processes are ended, and nothing more can be
    asked.
    """

    def __init__(
        self, base: Path, settings: TrainingSettings, *, device: str, processes: Processes | None = None
    ) -> None:
        """Start the trainer in `processes`, or in new ones; on the `device` "cuda" each has a GPU of its own."""
        start = Start(backend="nccl" if device == "cuda" else "gloo", threads=threads_for(base))
        self._processes = processes or Processes(settings.processes, start)
        self._processes.ask(f"{_MEMBER}:begin", base, settings, device)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of its members."""
        return self._processes.pids

    def update(self, samples: Sequence[SampleAssembled], **options: Any) -> StepSummary:
        """Take the steps of a version, as `Trainer.update` does with these options; StepRefused ends no process."""
        outcome: StepSummary | StepRefused = self._call("update", tuple(samples), **options)
        if isinstance(outcome, StepRefused):
            raise outcome
        return outcome

    def choose_hints(self, samples: Sequence[SampleAssembled]) -> tuple[int, ...]:
        """Return for each sample the number of the offered hint to train on, as `Trainer.choose_hints` does."""
        chosen: tuple[int, ...] = self._call("choose_hints", tuple(samples))
        return chosen

    def save(self, folder: Path) -> None:
        """Write what engines load."""
        self._call("save", folder)

    def save_state(self, folder: Path) -> None:
        """Write what `restore` needs beside the weights, in any number of processes."""
        self._call("save_state", folder)

    def settle(self, folder: Path) -> None:
        """Take over the weights that are published wherever those that were trained round to others."""
        self._call("settle", folder)

    def restore(self, folder: Path | None) -> None:
        """Go on from a checkpoint of this policy, whichever trainer wrote it; None: from its start."""
        self._call("restore", folder)

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        return self._processes.ask(f"{_MEMBER}:call", method, args, options)[0]

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def device_of(settings: TrainingSettings, named: str) -> str:
    """Return the team's device, given the one that a single process would use; raises ConfigError if there is none."""
    if settings.trainer == "megatron" and find_spec("megatron") is None:
        raise ConfigError(
            'training.trainer = "megatron" needs megatron-core, which is not installed. Nothing is trained. Install '
            "clawstream with its extra megatron."
        )
    if named == "cpu":
        if settings.trainer == "megatron":
            raise ConfigError(
                'training.trainer = "megatron" needs a GPU for each of its processes, and torch sees none here. '
                'Nothing is trained. Take "torch", which needs none.'
            )
        return "cpu"
    if settings.processes > torch.cuda.device_count():
        raise ConfigError(
            f"training.processes = {settings.processes}, and torch sees {torch.cuda.device_count()} GPUs. Nothing is "
            "trained. Take as many processes as GPUs, or fewer."
        )
    return "cuda"
