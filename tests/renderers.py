"""The renderer of a model's folder, as tests make it."""

from pathlib import Path

from clawstream.config import PolicySettings
from clawstream.rendering.renderer import PromptRenderer


def load_renderer(folder: Path, renderer: str = "auto", enable_thinking: bool | None = None) -> PromptRenderer:
    """The renderer of the model in `folder`."""
    return PromptRenderer.of(PolicySettings(renderer=renderer, enable_thinking=enable_thinking), folder)
