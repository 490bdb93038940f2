"""Two processes for all tests of this folder, more for some, and tiny models of each family."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clawstream.config import TrainingSettings
from clawstream.training.processes import Processes, Start
from clawstream.training.stepping import Team
from tests.forks import forking
from tests.parts.training.parallel import families
from tests.parts.training.parallel.cuda_on_cpu import cuda_on_cpu

QUESTIONS = "tests.parts.training.parallel.questions"  # not imported here: Megatron-Core warns of what is not installed

Teams = Callable[[Path, TrainingSettings], Team]


def two_processes() -> Processes:
    """Start two processes that know each other."""
    return Processes(2, Start(backend="gloo", threads=1, patience_s=60, around=cuda_on_cpu))


def forked_processes(count: int) -> Processes:
    """Start processes that know each other, as forks of one that has imported it all, which takes 8 s of CPU.

    They have one seed of hashes: in what order each has a set is told by `two_processes` alone.
    """
    forking()
    start = Start(backend="gloo", threads=1, patience_s=120, forked=True, around=cuda_on_cpu)
    return Processes(count, start)


@pytest.fixture(scope="package")
def two() -> Iterator[Processes]:
    """Two processes that know each other."""
    processes = two_processes()
    yield processes
    processes.close()


@pytest.fixture
def teams(two: Processes) -> Teams:
    """Make the two processes a team that trains a base."""
    return lambda base, settings: Team(base, settings, device="cpu", processes=two)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each family, not to be changed."""
    return {name: families.build(tmp_path_factory.mktemp(name), name) for name in families.CONFIGS}
