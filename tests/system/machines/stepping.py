"""What each process of a test does that torchrun started: the first takes steps as a team, the others serve it.

Megatron-Core puts its buffers on `cuda`, here the CPU, so this is no `clawstream train`.
"""

import json
import sys
import time
from pathlib import Path

from clawstream.config import TrainingSettings
from clawstream.errors import OperatorError
from clawstream.training.processes import Ranks, Start
from clawstream.training.stepping import Team
from tests.keeping import keep
from tests.parts.training.parallel.cuda_on_cpu import cuda_on_cpu
from tests.parts.training.parallel.test_trainers import MIXED

HELD_AT_MOST_S = 120.0
HELD, IN_STEP = "held", "in-step"  # files of the test: the second step waits while there is one; it begins


def main(base: Path, folder: Path, cuts: str) -> None:
    """Take two steps with each of the settings; keep both versions in a folder of its number, and begin there."""
    with Ranks(Start(backend="gloo", patience_s=120, around=cuda_on_cpu)) as ranks:
        if ranks.rank > 0:
            ranks.serve()
            return
        for number, changes in enumerate(json.loads(cuts)):
            first, second = (folder / f"{number}" / f"{version}" for version in (1, 2))
            team = Team(base, TrainingSettings(**changes), device="cpu", processes=ranks)
            if first.exists():
                team.restore(first)
            else:
                team.update(MIXED, version=1, seed=1)
                keep(team, first)
            (folder / IN_STEP).touch()
            deadline = time.monotonic() + HELD_AT_MOST_S
            while (folder / HELD).exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            team.update(MIXED, version=2, seed=2)
            keep(team, second)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    except OperatorError as error:
        sys.exit(f"stepping: {error}")
