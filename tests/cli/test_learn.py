"""What `clawstream learn` refuses before it runs anything, and what it prints."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from clawstream.cli import app
from clawstream.cli.learn_tables import show, tables
from clawstream.cli.progress import shown
from clawstream.errors import ConfigError, OperatorError, PartUnavailable
from clawstream.locks import locked
from clawstream.simulation.controls import Control
from clawstream.simulation.run import Progress
from tests.simulation.outcomes import REFERENCE, failed, row


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods", "guessing"], "--methods guessing: 'guessing' is not a valid Method"),
        (["--seeds", "one"], "--seeds one: invalid literal"),
        (["--seeds", " ,"], "--seeds names nothing"),
        (["--controls", "none"], "--controls none: 'none' is not a valid Control"),
        (["--updates", "16", "--score-at", "17"], "--score-at 17: there are 16 updates"),
        (["--json", "nowhere/learn.json"], "--json nowhere/learn.json: there is no folder"),
        (["--folder", "runs", "--json", "runs/learn.json", "--methods", "guess"], "--methods guess"),
        (["--plot", "nowhere/learn.png"], "--plot nowhere/learn.png: there is no folder"),
        (["--before", "1", "--requests", "3"], "--before, --requests: no effect without --real"),
        (["--real", "--methods", "opd", "--folder", "x"], "--methods, --folder: no effect with --real"),
        (
            ["--scenario", "tools", "--methods", "binary"],
            "--methods binary: expected outcome, stepwise with --scenario",
        ),
        (["--scenario", "tools", "--base", "hard"], "--base hard: expected tools with --scenario tools"),
        (["--scenario", "all", "--base", "tools"], "--base tools: expected standard, hard, demo with --scenario all"),
        (["--methods", "stepwise"], "--methods stepwise: expected binary, opd, combined, topk with --scenario all"),
        (
            ["--methods", "opd,combined", "--controls", "frozen,coin"],
            "--controls coin: it changes nothing of --methods",
        ),
        (["--scenario", "tools", "--methods", "outcome", "--controls", "shuffled"], "expected one of stepwise"),
        (["--scenario", "tools", "--hurry"], "--hurry: no effect with --scenario tools"),
        (["--real", "--seeds", "1,2"], "--seeds 1,2: --real draws with one seed"),
    ],
)
def test_an_option_that_makes_no_grid_is_named_before_anything_is_run(
    tmp_path: Path, options: list[str], said: str
) -> None:
    config = tmp_path / "clawstream.toml"
    config.write_text(f"environment = false\ndata_dir = '{tmp_path}'\ncache_dir = '{tmp_path}'\n")

    result = CliRunner().invoke(app, ["-c", str(config), "learn", *options])

    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["clawstream.toml"]


def test_a_policy_that_is_served_elsewhere_is_not_started_here(tmp_path: Path) -> None:
    config = tmp_path / "clawstream.toml"
    config.write_text(f"environment = false\ndata_dir = '{tmp_path}'\n[engine]\nurls = ['http://gpu:30000']\n")

    result = CliRunner().invoke(app, ["-c", str(config), "learn", "--real", "--seeds", "3"])

    assert isinstance(result.exception, OperatorError)
    assert "engine.urls names http://gpu:30000" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["clawstream.toml"]


def test_a_folder_that_is_in_use_is_not_written_to(tmp_path: Path) -> None:
    config = tmp_path / "clawstream.toml"
    config.write_text(f"environment = false\ndata_dir = '{tmp_path}'\ncache_dir = '{tmp_path}'\n")
    folder = tmp_path / "learn"
    folder.mkdir()

    with locked(folder / ".lock", within_s=0):
        result = CliRunner().invoke(app, ["-c", str(config), "learn"])

    assert isinstance(result.exception, PartUnavailable)
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_the_tables_say_scores_shares_differences_controls_and_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(0.32, 0.5, method="binary"), row(0.32, 0.52, method="binary", seed=1), failed("binary", seed=2)]
    rows += [row(0.5, 0.6), row(0.5, 0.8, seed=1), row(0.2, 0.25, control=Control.COIN)]

    show(tables(rows, REFERENCE))

    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "binary 2 (1 failed) 0.20 (0.16-0.24) 25% 0.32 (0.32-0.32) 40% 0.51 (0.38-0.64) 64% 4.5" in lines
    assert "hint in the prompt 0.80 (0.76-0.84)" in lines
    assert "combined above binary 16 +0.19 (-0.38, +0.76)" in lines
    assert "combined, coin +0.05 +0.35 no" in lines
    show(tables([row(0.5, 0.7), row(0.2, 0.25, control=Control.COIN), failed(seed=1)], REFERENCE))
    assert "combined, coin +0.05 +0.45 unknown (1 of 2 seeds)" in " ".join(
        capsys.readouterr().out.replace("│", " ").split()
    )


@pytest.mark.parametrize("unit", ["updates", "rounds"])
def test_who_has_no_terminal_is_told_in_what_a_run_counts(unit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with shown(Console(file=io.StringIO()), 4, unit) as tell:
        tell("outcome seed 0", Progress(phase="agents try", update=1))

    assert capsys.readouterr().err == f"outcome seed 0: agents try: 1/4 {unit}\n"


def test_one_method_without_controls_has_one_table() -> None:
    assert len(tables([row(0.3, 0.5)], REFERENCE)) == 1
