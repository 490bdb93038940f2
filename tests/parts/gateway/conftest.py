"""A real tokenizer and template for the gateway's tests: byte-level, so that characters can be cut in half."""

from pathlib import Path

import pytest

from clawstream.rendering.renderer import PromptRenderer
from tests.parts.engine.tiny_model import make_tokenizer
from tests.renderers import load_renderer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def renderer(tokenizer_folder: Path) -> PromptRenderer:
    """Qwen3's template, thinking left to the model."""
    return load_renderer(tokenizer_folder, "qwen3")
