"""A grid goes on where it stopped, and a cell that fails stops no other."""

import json
from pathlib import Path

import pytest

from clawstream.simulation.cell import OUTCOME
from clawstream.simulation.grid import Cell
from clawstream.simulation.learning import Grid
from clawstream.simulation.people import people_of
from clawstream.simulation.run import Progress
from tests.simulation.outcomes import REFERENCE, cell, outcome

NONSENSE = cell("nonsense")  # the settings refuse it before anything is started


def keep(grid: Grid, of: Cell, last: float) -> None:
    folder = grid.folder_of(of)
    folder.mkdir(parents=True)
    (folder / OUTCOME).write_text(json.dumps(outcome(0.4, last).as_json()))


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    people = people_of("student", tmp_path / "problems")
    return Grid(tmp_path / "grid", people, tmp_path / "base", tmp_path / "cache")


async def test_a_cell_that_is_there_is_not_run_again_and_one_that_fails_is_a_row_with_its_error(grid: Grid) -> None:
    told: list[tuple[str, str]] = []

    def tell(of: Cell, step: Progress) -> None:
        told.append((of.title, step.phase))

    keep(grid, cell(seed=0), 0.6)
    keep(grid, cell(seed=1), 0.7)
    rows = await grid.run([cell(seed=0), NONSENSE, cell(seed=1)], REFERENCE, at_once=1, tell=tell)

    assert [row.outcome and row.outcome.scores[16].score for row in rows] == [0.6, None, 0.7]
    assert rows[0].error is rows[2].error is None
    assert rows[1].error is not None
    assert "exit code 2" in rows[1].error
    assert "nonsense" in rows[1].error
    assert [phase for title, phase in told if title == "combined seed 0"] == ["done"]
    assert [phase for title, phase in told if title == NONSENSE.title][-1] == "failed"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"scores": {"8": 1}}', "\x00"])
async def test_an_outcome_that_can_not_be_read_is_named_and_its_cell_run_again_while_the_others_stand(
    grid: Grid, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep(grid, cell(seed=0), 0.6)
    keep(grid, NONSENSE, 0.6)
    half = grid.folder_of(NONSENSE) / OUTCOME
    half.write_text(text)

    rows = await grid.run([NONSENSE, cell(seed=0)], REFERENCE, at_once=1, tell=lambda _, __: None)

    assert str(half) in caplog.text
    assert "exit code 2" in str(rows[0].error)
    assert rows[1].outcome is not None


async def test_a_cell_that_was_cut_off_begins_anew(grid: Grid) -> None:
    left = grid.folder_of(NONSENSE) / "kafka"
    left.mkdir(parents=True)
    (row,) = await grid.run([NONSENSE], REFERENCE, at_once=1, tell=lambda _, __: None)

    assert row.outcome is None
    assert not left.exists()


def test_a_cell_with_another_plan_is_another(grid: Grid) -> None:
    keep(grid, cell(seed=0), 0.6)

    assert grid.kept(cell(seed=0)) is not None
    assert grid.kept(cell(seed=2)) is None
