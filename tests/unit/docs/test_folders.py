"""The package is of a size that somebody can know: modules, folders, files, and names with one meaning.

The folders of its tests are no fuller than its own.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest

import clawstream

PACKAGE = Path(clawstream.__file__).parent
# 280, three of `clawstream plan`, one of reward models; vLLM's dialect and its client, what it shares with SGLang's
# client, and the choice between the two; a service that trains: its SDK, its trainer, its engine; pictures: their
# marks, a request's, and their store; prompts that are made aside.
MOST_MODULES, MOST_FILES, MOST_LINES = 295, 15, 400
MOST_NAMES_TWICE = 15
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({file.parent for file in MODULES})
TESTS = [file for tier in ("unit", "parts", "system") for file in (Path(__file__).parents[2] / tier).rglob("*.py")]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(PACKAGE.parent).as_posix())
def test_a_folder_holds_at_most_15_modules(folder: Path) -> None:
    found = sorted(file.name for file in folder.glob("*.py"))
    assert len(found) <= MOST_FILES, f"{folder} holds {len(found)} modules: part it by what they are for"


def test_a_folder_of_tests_holds_at_most_15_files_beside_its_init() -> None:
    files = Counter(file.parent for file in TESTS if file.name != "__init__.py")
    full = {folder.as_posix(): count for folder, count in files.items() if count > MOST_FILES}
    assert full == {}, "part them as what they test is parted"


def test_there_are_no_more_modules_than_somebody_can_know() -> None:
    assert len(MODULES) <= MOST_MODULES, f"{len(MODULES)} modules: put the new one's content where its neighbours are"


def test_no_module_is_longer_than_400_lines() -> None:
    lines = {file.relative_to(PACKAGE).as_posix(): file.read_text().count("\n") for file in MODULES}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_a_class_name_has_one_meaning() -> None:
    names = Counter(
        node.name
        for file in MODULES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    twice = sorted(name for name, count in names.items() if count > 1)
    assert len(twice) <= MOST_NAMES_TWICE, twice
