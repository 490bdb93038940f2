"""The trainer as a process of its own that ends at a chosen point, as `kill -9` ends it: nothing is said or closed.

The process is the command `clawstream train`; the hooks stand around the real functions and do nothing but strike.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401  # seconds, which each life would take again

from clawstream.cli import main
from clawstream.events import BatchPlanned, Event, PolicyPublished
from clawstream.inference.model_folder import MANIFEST, STATE_FOLDER
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.training import loop, stepping  # noqa: F401
from clawstream.training.step.trainer import Trainer
from tests.forks import forking

WEIGHTS, STATE = ".writing-v", f".writing-{STATE_FOLDER}"  # folders that are not in their place yet


class Point(StrEnum):
    """Where the trainer is killed."""

    BEFORE_PLAN = "before the plan is on the log"
    BEFORE_STEP = "before the step"
    IN_STEP = "inside the step: the weights have moved"
    AFTER_STEP = "after the step"
    BEFORE_CHECKPOINT = "before the checkpoint"
    HALF_WEIGHTS = "inside the checkpoint: half of the weights are written"
    HALF_MANIFEST = "inside the checkpoint: half of the manifest is written"
    UNNAMED = "inside the checkpoint: it is whole and not in its place"
    AFTER_CHECKPOINT = "after the checkpoint"
    BEFORE_PUBLISHING = "before publishing"
    IN_PUBLISHING = "inside publishing: the step is said, the version is not"
    AFTER_PUBLISHING = "after publishing"
    BEFORE_STATE = "before the state"
    HALF_STATE = "inside the state: half of the moments are written"
    HALF_STATE_MANIFEST = "inside the state: half of its manifest is written"
    STATE_UNNAMED = "inside the state: it is whole and not in its place"
    AFTER_STATE = "after the state"


def begin(config: Path, words: Path, *, point: Point | None = None, occurrence: int = 1) -> BaseProcess:
    """Return a trainer that has just begun and is killed when it comes to `point` for the n-th time."""
    process = forking().Process(target=_live, args=(config, words, point, occurrence))
    process.start()
    return process


def _live(config: Path, words: Path, point: Point | None, occurrence: int) -> None:
    stderr = os.open(words, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stderr, 2)
    os.close(stderr)
    if point is not None:
        _arm(point, _Strike(occurrence))
    sys.argv = ["clawstream", "--config", str(config), "train"]
    main()


class _Strike:
    """Kills this process when it is due."""

    def __init__(self, occurrence: int) -> None:
        self._left = occurrence

    def is_due(self) -> bool:
        """Count one occurrence; return whether it is the one."""
        self._left -= 1
        return self._left == 0

    def now(self) -> None:
        """Kill."""
        os.kill(os.getpid(), signal.SIGKILL)


def _arm(point: Point, strike: _Strike) -> None:
    match point:
        case Point.BEFORE_PLAN | Point.BEFORE_PUBLISHING:
            _on_append(BatchPlanned if point is Point.BEFORE_PLAN else PolicyPublished, strike, deliver=0)
        case Point.IN_PUBLISHING:
            _on_append(PolicyPublished, strike, deliver=1)
        case Point.AFTER_PUBLISHING:
            _on_append(PolicyPublished, strike, deliver=2)
        case Point.BEFORE_STEP:
            _around(Trainer, "update", strike, before=True)
        case Point.IN_STEP:
            _around(torch.optim.AdamW, "step", strike)
        case Point.AFTER_STEP:
            _around(Trainer, "update", strike)
        case Point.BEFORE_CHECKPOINT:
            _around(Trainer, "save", strike, before=True)
        case Point.HALF_WEIGHTS:
            _on_save("save", "model.safetensors", strike)
        case Point.HALF_MANIFEST | Point.HALF_STATE_MANIFEST:
            _on_manifest(strike, WEIGHTS if point is Point.HALF_MANIFEST else STATE)
        case Point.UNNAMED | Point.STATE_UNNAMED:
            _around(Path, "rename", strike, before=True, of=WEIGHTS if point is Point.UNNAMED else STATE)
        case Point.AFTER_CHECKPOINT:
            _around(stepping, "write", strike)
        case Point.BEFORE_STATE | Point.AFTER_STATE:
            _around(stepping, "write_state", strike, before=point is Point.BEFORE_STATE)
        case Point.HALF_STATE:
            _on_save("save_state", "optimizer.safetensors", strike)


def _around(owner: Any, name: str, strike: _Strike, *, before: bool = False, of: str | None = None) -> None:
    """Strike around a function or, with `of`, around a path's method where the path has such a name."""
    own: Callable[..., Any] = getattr(owner, name)

    def hooked(*arguments: Any, **options: Any) -> Any:
        due = (of is None or arguments[0].name.startswith(of)) and strike.is_due()
        if due and before:
            strike.now()
        found = own(*arguments, **options)
        if due:
            strike.now()
        return found

    setattr(owner, name, hooked)


def _on_append(kind: type[Event], strike: _Strike, *, deliver: int) -> None:
    """Strike once so many events of an append that has such an event, and a step or a plan, are acknowledged."""
    own = KafkaLog.append

    async def append(self: KafkaLog, events: Sequence[Event], *arguments: Any, **options: Any) -> None:
        if any(isinstance(event, kind) for event in events) and strike.is_due():
            if deliver:
                await own(self, events[:deliver], *arguments, **options)
            strike.now()
        await own(self, events, *arguments, **options)

    KafkaLog.append = append  # type: ignore[method-assign]


def _on_save(name: str, file: str, strike: _Strike) -> None:
    own = getattr(Trainer, name)

    def save(self: Trainer, folder: Path) -> None:
        own(self, folder)
        if strike.is_due():
            os.truncate(folder / file, (folder / file).stat().st_size // 2)
            strike.now()

    setattr(Trainer, name, save)


def _on_manifest(strike: _Strike, of: str) -> None:
    own = Path.write_bytes

    def write_bytes(self: Path, data: bytes) -> int:
        if self.name == MANIFEST and self.parent.name.startswith(of) and strike.is_due():
            own(self, data[: len(data) // 2])
            strike.now()
        return own(self, data)

    Path.write_bytes = write_bytes  # type: ignore[assignment, method-assign]
