"""A gateway for real clients: a tokenizer and the family's template, and an engine that says what the test wants."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engine.tiny_model import make_tokenizer
from tests.gateway.house import House, house


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture
async def gateway(tokenizer_folder: Path) -> AsyncIterator[House]:
    """One gateway for each test."""
    async with house(tokenizer_folder) as found:
        yield found
