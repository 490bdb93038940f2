"""What a demo says at its end can be copied."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from clawstream.cli.learning import demo
from clawstream.cli.learning.demo import _what_next


def test_paths_are_not_cut_where_the_terminal_is_narrow() -> None:
    said = StringIO()
    folder = Path("/home/somebody/.local/share/clawstream/demos/20260101-000000-combined-seed0")

    _what_next(Console(file=said, width=40), folder, folder / "scores.png")

    lines = said.getvalue().splitlines()
    assert f"Plot: {folder / 'scores.png'}" in lines
    assert sum(f"-c {folder / 'clawstream.toml'} sql " in line for line in lines) == 3


@pytest.mark.parametrize(
    ("checkout", "run"),
    [
        (Path("/home/a b/clawstream"), "uv run --project '/home/a b/clawstream' --extra local clawstream"),
        (None, "clawstream"),
    ],
)
def test_queries_run_from_any_folder(checkout: Path | None, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "own_checkout", lambda: checkout)
    said = StringIO()
    _what_next(Console(file=said, width=40), Path("/runs/my demo"), Path("scores.png"))
    assert said.getvalue().count(f"  {run} -c '/runs/my demo/clawstream.toml' sql ") == 3
