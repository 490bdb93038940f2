"""The processes of a trainer: how they are started, asked and ended.

All processes are asked the same thing, one thing at a time. If one ends, their common work is lost, so all are ended.
Those of one machine are started here; those of several machines by torchrun, which starts all of them again if one
ends.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # it is documented there
from torch.distributed.rendezvous import rendezvous

from clawstream.config import TrainingSettings, stay_on_this_machine
from clawstream.errors import ConfigError, OperatorError, PartUnavailable

JOIN_S = 10.0
LOST_WITHIN_S = 2.0  # after one process' error, how long to look for another that ended and caused it
# After so long a wait a process takes another for lost. In one step no two processes differ by as much.
PATIENCE_S = 600.0
LOOK_AGAIN_S = 0.05  # for a word of another process
_PR_SET_PDEATHSIG = 1  # prctl(2)


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


class Ranks:
    """The processes that torchrun started, on one machine or on several; the first asks all of them, itself too.

    Each says in their common store when it is done: an error reaches the first process though others still wait for
    each other.
    """

    def __init__(self, start: Start) -> None:
        """Let them find each other; raises PartUnavailable where some are not there within `patience_s`."""
        self.rank, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._start, self._state, self._number = start, dict[str, Any](), 0
        patience = timedelta(seconds=start.patience_s)
        with self._on_its_gpu(), self._reached():
            store, rank, count = next(rendezvous("env://", timeout=patience))
            self._store, group = PrefixStore("asking", store), PrefixStore("group", store)
            self._refuse_other_backend()
            dist.init_process_group(start.backend, store=group, rank=rank, world_size=count, timeout=patience)
            self._talk: Any = dist.new_group(backend="gloo", timeout=patience)
            self._store.set(f"at/{self.rank}", f"{self.rank} ({socket.gethostname()}, pid {os.getpid()})")

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _at: object) -> None:
        """End the others: with an error if this one has one, as then torchrun starts all of them again."""
        with contextlib.suppress(RuntimeError, PartUnavailable):  # the store may have ended before
            if self.rank == 0:
                self._store.set(f"asked/{self._number}", "end" if error is None else "fail")
                self._silent("ended", LOST_WITHIN_S)  # the store ends with this process
            if error is None:  # else it might wait for those that are lost
                dist.destroy_process_group()

    def close(self) -> None:
        """Do nothing: they are there for the next trainer, until the block ends."""

    def ask(self, work: str, *args: Any) -> list[Any]:
        """Return what `work(state, *args)` returns in each process, as `Processes.ask` does; in the first alone.

        Raises the first error that a process reported, or PartUnavailable where one was lost. Then all have to end.
        """
        with self._reached():
            self._store.set(f"asked/{self._number}", "work")
            dist.broadcast_object_list([work, args], src=0, group=self._talk)
        return self._do(work, args)

    def serve(self) -> None:
        """Do what the first process asks for until it ends; raises PartUnavailable where it failed or was lost."""
        for stopping in (signal.SIGINT, signal.SIGTERM):  # the first process finishes its step, then ends this one
            signal.signal(stopping, signal.SIG_IGN)
        while (heard := self._heard()) == "work":
            asked: list[Any] = [None, None]
            with self._reached():
                dist.broadcast_object_list(asked, src=0, group=self._talk)
            self._do(*asked)
        with self._reached():
            self._store.set(f"ended/{self.rank}", "")
        if heard == "fail":
            raise PartUnavailable("the trainer's first process failed, as its output says. This one ends with it")

    def _heard(self) -> str:
        with self._reached():
            while not self._store.check([f"asked/{self._number}"]):
                time.sleep(LOOK_AGAIN_S)
            return self._said(f"asked/{self._number}")

    def _do(self, work: str, args: Sequence[Any]) -> list[Any]:
        number, self._number = self._number, self._number + 1
        with self._on_its_gpu():
            error, value = _answer(work, self._state, args)
        with self._reached():
            if error is not None and self._store.add(f"failed/{number}", 1) == 1:
                why = str(error).strip().rsplit("\n", 1)[-1]  # of a traceback the error
                self._store.set(f"why/{number}", f"process {self.rank}: {why}")
            self._store.set(f"done/{number}/{self.rank}", "")
            if self.rank == 0:
                error = self._failure(number, error)
        if error is not None:
            raise error
        values: list[Any] = [None] * self.count
        with self._reached():
            dist.all_gather_object(values, value, group=self._talk)
            if self.rank == 0:
                for key in (f"asked/{number}", *(f"done/{number}/{rank}" for rank in range(self.count))):
                    self._store.delete_key(key)
        return values

    def _failure(self, number: int, own: Exception | None) -> Exception | None:
        """Return this process' error, or another's, or that some are silent; None once all are done without one."""
        if isinstance(own, OperatorError):
            return own
        silent = self._silent(f"done/{number}", self._start.patience_s if own is None else LOST_WITHIN_S)
        failed = self._store.check([f"why/{number}"])
        why = f"First error: {self._said(f'why/{number}')}. " if failed else ""
        if silent:
            return self._gone(", ".join(self._said(f"at/{rank}") for rank in silent), why)
        return own or (PartUnavailable(f"a process of the trainer failed. {why}") if failed else None)

    def _silent(self, what: str, within_s: float) -> list[int]:
        """Return which of the others have not said `what` by then."""
        deadline, missing = time.monotonic() + within_s, [*range(1, self.count)]
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self._store.check([f"{what}/{rank}"])]
            time.sleep(LOOK_AGAIN_S if missing else 0.0)
        return missing

    def _said(self, key: str) -> str:
        return str(self._store.get(key), "utf-8")

    def _refuse_other_backend(self) -> None:
        mine = self._start.backend
        if self.rank == 0:
            self._store.set("backend", mine)
        elif (theirs := self._said("backend")) != mine:
            raise ConfigError(
                f"process {self.rank} ({socket.gethostname()}) would talk by {mine}, and the first one by {theirs}: "
                "torch sees GPUs on one of their machines alone. Nothing is trained. Look at the driver there."
            )

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of a store or a group; not all are DistErrors
            raise self._gone("some", f"({error}) ") from error

    def _gone(self, which: str, why: str) -> PartUnavailable:
        return PartUnavailable(
            f"of the trainer's {self.count} processes, {which} can't be reached by process {self.rank}. {why}The work "
            "they had begun is lost; what is published stays. Start torchrun again on each machine: they go on from "
            "the newest checkpoint. If they never find each other, name the interface between the machines in "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )

    def _on_its_gpu(self) -> AbstractContextManager[None]:  # which one is the thread's own
        if self._start.backend == "nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return self._start.around()


def ranks_of(training: TrainingSettings) -> Ranks | None:
    """Return the processes that torchrun started, this one among them; None where it started none, or this one alone.

    Raises ConfigError where they are not as many as the settings say, or would not find each other a second time.
    """
    if not among_several():
        return None
    count, here, gpus = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if training.processes != count:
        raise ConfigError(
            f"torchrun started {count} processes (--nnodes times --nproc-per-node), and training.processes = "
            f"{training.processes}. Nothing is trained. Set it to {count}."
        )
    if 0 < gpus < here:
        raise ConfigError(
            f"torchrun started {here} processes on this machine, and torch sees {gpus} GPUs here. Nothing is trained. "
            f"Take --nproc-per-node {gpus}."
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError(
            "torchrun gives processes that it starts again the addresses of those that ended (torch's issue 135712), "
            "so a machine that comes back would find nobody. Nothing is trained. Set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on each machine."
        )
    return Ranks(Start(backend="nccl" if gpus else "gloo"))


def among_several() -> bool:
    """Return whether this is one of several processes that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


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
