"""A renderer for each family, made of a model folder that stands in for the family's own."""

from pathlib import Path

import pytest

from clawstream.rendering.renderer import PromptRenderer
from tests.parts.families.formats import FORMATS
from tests.parts.families.gpt_oss import make_gpt_oss
from tests.parts.families.standins import FAMILIES, make_folder
from tests.parts.sglang.installation import sglang_installation
from tests.renderers import load_renderer


class Folders(dict[str, Path]):
    """Model folders by the name of their stand-in, each made when it is asked for."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def __missing__(self, name: str) -> Path:
        if name == "gpt-oss":
            self[name] = make_gpt_oss(self._parent / name, sglang_installation().python.parents[1])
        else:
            self[name] = make_folder(self._parent / name, FAMILIES[name])
        return self[name]


class Renderers(dict[str, PromptRenderer]):
    """Renderers by format, each made when it is asked for."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders

    def __missing__(self, name: str) -> PromptRenderer:
        form = FORMATS[name]
        self[name] = load_renderer(self._folders[form.folder], form.renderer)
        return self[name]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Model folders without weights."""
    return Folders(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="session")
def renderers(folders: Folders) -> Renderers:
    """A renderer for each format."""
    return Renderers(folders)
