"""A folder of the package fits on a screen."""

from pathlib import Path

import pytest

import clawstream

PACKAGE = Path(clawstream.__file__).parent
MOST_FILES = 15
FOLDERS = sorted({file.parent for file in PACKAGE.rglob("*.py")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(PACKAGE.parent).as_posix())
def test_a_folder_holds_at_most_15_modules(folder: Path) -> None:
    found = sorted(file.name for file in folder.glob("*.py"))
    assert len(found) <= MOST_FILES, f"{folder} holds {len(found)} modules: part it by what they are for"
