"""How much memory a trainer's process takes beyond what it has imported; runs in each of them."""

from pathlib import Path
from typing import Any

from clawstream.config import TrainingSettings
from clawstream.errors import StepRefused
from clawstream.events import SampleAssembled
from clawstream.training.step.trainer import Trainer
from clawstream.training.stepping import begin
from tests.parts.training import tiny


def measure(
    state: dict[str, Any], warm: Path, base: Path, settings: TrainingSettings, samples: list[SampleAssembled]
) -> float:
    """Return the bytes of a second step's peak, when moments are there; a small model's step comes before."""
    short = settings.model_copy(update={"micro_batch_tokens": 64})
    few = [tiny.sample("warm", hinted=True), tiny.sample("up", reward=-1)]
    _steps(state, warm, short, few)
    before = _most_bytes()
    _steps(state, base, settings, samples)
    return _most_bytes() - before


def _steps(state: dict[str, Any], base: Path, settings: TrainingSettings, samples: list[SampleAssembled]) -> None:
    if settings.processes > 1:
        begin(state, base, settings, "cpu")
    else:
        state["trainer"] = Trainer(base, settings)
    for version in (1, 2):
        try:
            state["trainer"].update(samples, version=version, seed=version, gated=settings.gate)
        except StepRefused:  # what random answers teach may be: the gate has measured by then
            continue
    del state["trainer"]


def _most_bytes() -> float:
    """Return the most that this process ever had; its `ru_maxrss` would count what started it, too."""
    status = Path("/proc/self/status").read_text()
    return 1024.0 * int(status.partition("VmHWM:")[2].split()[0])
