"""One small policy on disk for all tests of training."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.parts.training import tiny


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder, not to be changed."""
    return tiny.build(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def bfloat16_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, stored as most models are."""
    return tiny.build(tmp_path_factory.mktemp("bfloat16"), dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
