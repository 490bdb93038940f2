"""CI runs every test: what it leaves out of one call of pytest by its mark, another call looks for, in its folders."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CALL = re.compile(r'^.*\$pytest (?P<options>.*?)-m (?P<marks>"[^"]*"|\w+)(?P<folders>(?: tests/\S+)*)', re.MULTILINE)
ELSEWHERE = re.compile(r'^elsewhere="(.*)"$', re.MULTILINE)
NO_MACHINE = {"gpu"}  # for whoever has one


def calls() -> list[tuple[str, tuple[Path, ...]]]:
    """Return the expression of marks of each call of pytest, and the folders it looks in; none: in all."""
    found = CALL.finditer((ROOT / ".ci/run").read_text())
    return [(call["marks"].strip('"'), tuple(ROOT / folder for folder in call["folders"].split())) for call in found]


def marks_elsewhere() -> list[str]:
    [marks] = ELSEWHERE.findall((ROOT / ".ci/run").read_text())
    return [mark for mark in str(marks).split(" or ") if mark not in NO_MACHINE]


@pytest.mark.parametrize("mark", marks_elsewhere())
def test_a_mark_that_is_left_out_has_a_call_that_looks_in_every_folder_with_such_tests(mark: str) -> None:
    wanted = re.compile(rf"(?<!not )\b{mark}\b")
    [folders] = [folders for marks, folders in calls() if "$elsewhere" not in marks and wanted.search(marks)]
    marked = [path for path in (ROOT / "tests").rglob("*.py") if f"pytest.mark.{mark}" in path.read_text()]
    assert marked
    beside = [path for path in marked if not any(path.is_relative_to(folder) for folder in folders)]
    assert beside == [], f"CI looks for {mark} in {', '.join(map(str, folders))}"


def test_the_quick_and_the_slow_tests_are_looked_for_in_all_folders() -> None:
    everywhere = [marks for marks, folders in calls() if not folders]
    assert everywhere == ["not ($elsewhere) and not slow", "not ($elsewhere) and slow"]
