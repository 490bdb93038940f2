"""A grid goes on where it stopped, and a cell that fails stops no other."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

import pytest

from clawstream.simulation.learn import cell as cells
from clawstream.simulation.learn.cell import OUTCOME, Grid
from clawstream.simulation.learn.grid import Cell
from clawstream.simulation.learn.outcome import Reference
from clawstream.simulation.runs.figures import VersionScore
from clawstream.simulation.runs.people import People, people_of
from clawstream.simulation.runs.run import RunProgress
from tests.unit.simulation.learn.outcomes import REFERENCE, cell, outcome
from tests.unit.simulation.learn.outcomes import score as a_score

NONSENSE = cell("nonsense")  # the settings refuse it before anything is started


def keep(grid: Grid, of: Cell, last: float) -> None:
    folder = grid.folder_of(of)
    folder.mkdir(parents=True)
    (folder / OUTCOME).write_text(json.dumps(asdict(outcome(0.4, last))))


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    people = people_of("student", tmp_path / "problems")
    return Grid(tmp_path / "grid", people, tmp_path / "base", tmp_path / "cache", base_sha="sha")


async def test_a_cell_that_is_there_is_not_run_again_and_one_that_fails_is_a_row_with_its_error(grid: Grid) -> None:
    told: list[tuple[str, str]] = []

    def tell(of: Cell, step: RunProgress) -> None:
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


@pytest.mark.slow
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


async def test_a_cell_that_was_cut_off_begins_again(grid: Grid) -> None:
    left = grid.folder_of(NONSENSE) / "kafka"
    left.mkdir(parents=True)
    (row,) = await grid.run([NONSENSE], REFERENCE, at_once=1, tell=lambda _, __: None)

    assert row.outcome is None
    assert not left.exists()


@dataclass(frozen=True)
class Asking:
    """A room that keeps which problems were asked in it."""

    problems: Path
    asked: list[str]

    async def score(self, *_: object, hinted: bool, **__: object) -> VersionScore:
        self.asked.append(self.problems.name)
        return a_score(0, (0.5 if self.problems.name == "scored.jsonl" else 0.1) + 0.3 * hinted)


async def test_the_base_is_scored_by_both_wishes_where_they_flip_and_each_is_kept(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    @asynccontextmanager
    async def room(folder: Path, people: People, cache_dir: Path, *, own: object) -> AsyncIterator[Asking]:
        del folder, cache_dir, own
        yield Asking(people.scored, asked)

    monkeypatch.setattr(cells, "room", room)
    (tmp_path / "grid").mkdir()
    words: list[str] = []
    plain, flips = await grid.reference(say=words.append), await grid.reference(flips=True)
    assert words[0].startswith("scoring the base")
    assert words[1] == f"the base scores {plain.baseline.score:.2f}; scoring it with the hint in its prompt"

    assert asked == ["scored.jsonl"] * 2 + ["scored-flipped.jsonl"] * 2
    assert plain == Reference(baseline=a_score(0, 0.5), ceiling=a_score(0, 0.8))
    assert flips == replace(plain, flipped=Reference(baseline=a_score(0, 0.1), ceiling=a_score(0, 0.4)))
    assert sorted(kept.name.partition("-")[0] for kept in (tmp_path / "grid").iterdir()) == ["flipped", "reference"]
    assert await grid.reference(flips=True) == flips
    assert len(asked) == 4


def test_what_is_wanted_after_a_flip_changes_no_name_of_what_was_run_without(tmp_path: Path) -> None:
    people = people_of("all", tmp_path)
    flipped, now = people.sha, people.asked.read_text()
    earlier = [{k: v for k, v in json.loads(line).items() if k != "flipped"} for line in now.splitlines()]
    people.asked.write_text("".join(f"{json.dumps(row)}\n" for row in earlier))

    assert now != people.asked.read_text()
    assert flipped == people.sha == sha256(people.asked.read_bytes() + people.scored.read_bytes()).hexdigest()[:12]


def test_a_cell_with_another_plan_is_another(grid: Grid) -> None:
    keep(grid, cell(seed=0), 0.6)

    assert grid.kept(cell(seed=0)) is not None
    assert grid.kept(cell(seed=2)) is None
