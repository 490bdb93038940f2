"""What `clawstream learn` refuses before it runs anything, and what it prints."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from clawstream.cli import app
from clawstream.cli.learning.learn import _say_where
from clawstream.cli.learning.progress import show, shown, tables
from clawstream.errors import ConfigError, OperatorError, PartUnavailable
from clawstream.locks import locked
from clawstream.simulation.learn.grid import usual_score_at
from clawstream.simulation.learn.plot import _ceilings, _pieces, plot_curves
from clawstream.simulation.learn.report import curves
from clawstream.simulation.opinions import Control
from clawstream.simulation.runs.run import RunProgress
from tests.unit.simulation.learn.outcomes import FLIPPED, REFERENCE, block_row, everyday_row, failed, long_row, row


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods", "guessing"], "--methods guessing: 'guessing' is not a valid LearnMethod"),
        (["--seeds", "one"], "--seeds one: invalid literal"),
        (["--seeds", " ,"], "--seeds names nothing"),
        (["--controls", "none"], "--controls none: 'none' is not a valid Control"),
        (["--updates", "16", "--score-at", "17"], "--score-at 17: there are 16 updates"),
        (["--teachers", "wise"], "--teachers wise: 'wise' is not a valid LearnTeacher"),
        (
            ["--teachers", "reference", "--methods", "binary"],
            "--teachers reference: hints teach nothing with --methods binary",
        ),
        (["--flip-after", "16"], "--flip-after 16: there are 16 updates. Nothing was run"),
        (
            ["--flip-after", "8", "--scenario", "student"],
            "--flip-after 8: with --scenario student there is nobody to exchange wishes with. Nothing was run",
        ),
        (["--flip-after", "8", "--hurry"], "--flip-after 8: people who ask on all the time"),
        (["--flip-after", "8", "--controls", "coin"], "--flip-after 8: --controls coin is compared with its method"),
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
        (["--base", "own"], "engine.model_path is not set"),
        (
            ["--scenario", "all", "--base", "tools"],
            "--base tools: expected standard, standard_2, standard_3, hard, demo, own with --scenario all",
        ),
        (["--methods", "stepwise"], "--methods stepwise: expected binary, opd, combined, topk with --scenario all"),
        (
            ["--methods", "opd,topk", "--controls", "frozen,coin"],
            "--controls coin: it changes nothing of --methods",
        ),
        (["--scenario", "tools", "--methods", "outcome", "--controls", "shuffled"], "expected one of stepwise"),
        (
            ["--base", "smollm2"],
            "--base smollm2: expected standard, standard_2, standard_3, hard, demo, own with --scenario all",
        ),
        (
            ["--scenario", "everyday", "--base", "standard"],
            "--base standard: expected smollm2 with --scenario everyday",
        ),
        (["--scenario", "everyday", "--problems", "p.json"], "--problems: no effect with --scenario everyday"),
        (["--split", "development", "--num-scored", "4"], "--split, --num-scored: no effect with --scenario all"),
        (["--scenario", "everyday_blocks", "--updates", "16"], "--scenario everyday_blocks has 3 blocks, all equally"),
        (["--scenario", "everyday", "--flip-after", "8"], "with --scenario everyday there is nobody to exchange"),
        (["--scenario", "tools", "--hurry"], "--hurry: no effect with --scenario tools"),
        (["--scenario", "tools", "--votes-together", "0.5"], "--votes-together: no effect with --scenario tools"),
        (["--scenario", "tools", "--wordy-hints", "0.5"], "--wordy-hints: no effect with --scenario tools"),
        (["--set", "kl"], "--set kl: expected NAME=VALUE. Nothing was run"),
        (["--set", "klee=1"], "--set klee=1: [training] has no setting klee"),
        (["--set", "epochs=2"], "--set epochs=2: an option of learn says it"),
        (["--set", "max_updates=2"], "--set max_updates=2: runs need batch_samples, max_wait_s"),
        (["--set", "kl=1", "--set", "kl = 2"], "--set kl = 2: it is said twice"),
        (["--set", "kl=-1"], "--set kl: Input should be greater than or equal to 0 (with --methods binary)"),
        (
            ["--set", "kl=0.1", "--set", "w_opd=2"],
            "--set w_opd: no effect with --methods binary, which learns from rewards alone. Nothing was run",
        ),
        (
            ["--methods", "combined,opd", "--set", "w_binary=0"],
            "--set w_binary: no effect with --methods opd, which learns from hints alone",
        ),
        (["--methods", "binary", "--set", "w_binary=0"], "--set w_binary = 0: method = 'binary' learns from rewards"),
        (["--methods", "binary", "--hint-choices", "fall"], "--hint-choices fall: hints teach nothing with --methods"),
        (["--hint-choices", "shortest"], "--hint-choices shortest: 'shortest' is not a valid"),
        (
            ["--scenario", "corrections", "--hint-choices", "longest,fall"],
            "before one could be chosen. Nothing was run",
        ),
        (["--methods", "topk", "--hint-choices", "overlap"], "--hint-choices overlap: overlap learns on the policy's"),
        (["--real", "--seeds", "1,2"], "--seeds 1,2: --real draws with one seed"),
        (
            ["--methods", "stepwise", "--scenario", "tools", "--answers-per-hint", "4"],
            "--answers-per-hint 4: hints teach nothing with --methods stepwise. Nothing was run",
        ),
        (
            ["--methods", "opd", "--w-topk", "1"],
            "--w-topk 1: it adds to combined, and --methods are opd. Nothing was run",
        ),
        (["--scenario", "blocks", "--updates", "16"], "--updates 16: --scenario blocks has 3 blocks, all equally long"),
        (["--scenario", "blocks", "--hurry"], "--hurry: with --scenario blocks the next people come after"),
        (["--scenario", "unrelated", "--answers-per-hint", "4"], "--answers-per-hint 4: with --scenario unrelated"),
        (["--scenario", "unrelated", "--methods", "binary"], "expected combined, opd, topk with --scenario unrelated"),
        (["--scenario", "unrelated", "--updates", "8", "--score-at", "13"], "--score-at 13: there are 12 updates"),
        (["--scenario", "blocks", "--flip-after", "10"], "with --scenario blocks there is nobody to exchange"),
        (
            ["--updates", "16", "--flip-after", "8", "--answers-per-hint", "4"],
            "--flip-after 8: with --answers-per-hint 4 a session gives several samples",
        ),
        (["--people", "m@http://x/v1"], "the simulated judge knows the words of simulated people alone"),
        (["--people", "m@http://x/v1", "--scenario", "blocks"], "a session may give several samples"),
        (["--people", "m@http://x/v1", "--updates", "9", "--flip-after", "8"], "a session may give several samples"),
        (["--scorer", "m@http://x/v1", "--scenario", "tools"], "--scorer: in --scenario tools agents ask"),
        (
            ["--judge", "m@http://x/v1", "--votes-together", "0.5"],
            "--votes-together: --judge m@http://x/v1, whose votes",
        ),
        (
            ["--judge", "m@http://x/v1", "--methods", "binary", "--controls", "coin"],
            "these replace what a simulated judge says, and --judge m@http://x/v1",
        ),
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


@pytest.mark.parametrize(
    ("model", "more", "options", "said"),
    [
        ("nowhere", "", [], "which is no folder"),
        (".", '[weights]\nurl = "http://gpu:9000"\n', [], "weights.url says that the trainer is elsewhere"),
        (".", "", ["--at-once", "2"], "serve one run's weights"),
        (
            ".",
            '[judge]\nurl = "http://judge/v1"\n',
            ["--methods", "binary", "--controls", "coin"],
            "these replace what a simulated judge says, and judge.url is http://judge/v1",
        ),
        (".", '[judge]\nurl = "http://judge/v1"\n', ["--votes-together", "0.5"], "whose votes nobody makes wrong"),
    ],
)
def test_what_can_not_be_done_with_an_own_policy_is_said_before_anything_is_run(
    tmp_path: Path, model: str, more: str, options: list[str], said: str
) -> None:
    config = tmp_path / "clawstream.toml"
    config.write_text(
        f"environment = false\ndata_dir = '{tmp_path}'\n"
        f"[engine]\nurls = ['http://gpu:30000']\nmodel_path = '{tmp_path / model}'\n{more}"
    )

    result = CliRunner().invoke(app, ["-c", str(config), "learn", "--base", "own", *options])

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


def test_what_a_control_leaves_out_is_said(tmp_path: Path) -> None:
    config = tmp_path / "clawstream.toml"
    config.write_text(f"environment = false\ndata_dir = '{tmp_path}'\ncache_dir = '{tmp_path}'\n")
    (tmp_path / "learn").mkdir()
    options = ["--methods", "binary,opd,combined", "--controls", "shuffled,coin"]

    with locked(tmp_path / "learn" / ".lock", within_s=0):  # so that nothing is run
        result = CliRunner().invoke(app, ["-c", str(config), "learn", *options])

    assert result.stderr.splitlines() == ["--controls coin changes nothing of opd: left out there"]


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
    rows += [row(0.5, 0.6), row(0.5, 0.8, seed=1), row(0.2, 0.25, control=Control.SHUFFLED)]

    show(tables(rows, REFERENCE))

    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "binary 2 (1 failed) 0.20 (0.16-0.24) 25% 0.32 (0.32-0.32) 40% 0.51 (0.38-0.64) 64% 4.5" in lines
    assert "hint in the prompt 0.80 (0.76-0.84)" in lines
    assert "combined above binary 16 +0.19 (-0.38, +0.76)" in lines
    assert "combined, shuffled +0.05 +0.35 no" in lines
    show(tables([row(0.5, 0.7), row(0.2, 0.25, control=Control.SHUFFLED), failed(seed=1)], REFERENCE))
    assert "combined, shuffled +0.05 +0.45 unknown (1 of 2 seeds)" in " ".join(
        capsys.readouterr().out.replace("│", " ").split()
    )


def test_the_tables_of_blocks_say_what_is_left_at_the_end_and_ask_no_steadiness(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ends = {10: {"student": 0.8, "teacher": 0.1}, 20: {"student": 0.6, "teacher": 0.5}}
    show(tables([block_row(ends | {30: {"student": 0.2, "teacher": 0.4, "ta": 0.9}})], REFERENCE))

    said = " ".join(capsys.readouterr().out.replace("│", " ").replace("┃", " ").split())
    assert "seeds student teacher ta kept newest" in said
    assert "combined 1 0.80 to 0.20 0.50 to 0.40 0.90 0.53 0.90" in said
    assert "What is wanted of each long run" not in said


def test_of_long_runs_the_tables_say_what_is_wanted_and_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    scores = {16: 0.7, 24: 0.72, 32: 0.6, 40: 0.2, 56: 0.4}
    rows = [long_row(scores, flip_after=32, at_flip=0.05), long_row(scores | {32: 0.7}, flip_after=32, seed=1)]

    show(tables(rows, replace(REFERENCE, flipped=FLIPPED)))

    said = " ".join(capsys.readouterr().out.replace("│", " ").replace("┃", " ").split())
    assert "after 24 after 32 after 32, flipped after 40" in said
    assert "the base, flipped 0.10 (0.06-0.14) hint in the prompt, flipped 0.50 (0.46-0.54)" in said
    assert "combined seed 0 no (0.12) yes (0.12) yes (0.00) yes (1.00 to 1.00) yes (1.00 to 1.00) yes (0.80)" in said
    assert "combined, runs 1 of 2 2 of 2 2 of 2 2 of 2 2 of 2 2 of 2" in said


def test_what_held_is_counted_by_method_and_teacher_and_of_failed_runs_nothing_did(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scores = {16: 0.7, 24: 0.72}
    rows = [long_row(scores), failed(seed=1), long_row(scores, teacher="reference"), failed("opd")]

    show(tables(rows, REFERENCE))

    said = " ".join(capsys.readouterr().out.replace("│", " ").replace("┃", " ").split())
    assert "combined, runs (1 failed) 1 of 2 1 of 2" in said
    assert "combined, reference teacher, runs 1 of 1 1 of 1" in said
    assert "opd, runs (1 failed) 0 of 1 0 of 1" in said


def test_what_nobody_knows_yet_is_not_counted_as_held_or_as_not(capsys: pytest.CaptureFixture[str]) -> None:
    show(tables([long_row({16: 0.7, 24: 0.3}, flip_after=16, at_flip=0.1)], replace(REFERENCE, flipped=FLIPPED)))

    assert "0 of 1 (1 unknown)" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_picture_of_a_flip_is_drawn_in_two_pieces(tmp_path: Path) -> None:
    scores = {16: 0.7, 32: 0.7, 40: 0.2, 56: 0.4}
    rows = [
        long_row(scores, flip_after=32, at_flip=0.05),
        long_row(scores, teacher="reference", flip_after=32, at_flip=0.1),
    ]
    (first, _) = curves(rows)

    before, after = _pieces(first)
    assert [point.update for point in before] == [0, 16, 32]
    assert [(point.update, point.score.mean) for point in after] == [(32, 0.05), (40, 0.2), (56, 0.4)]
    flipped = replace(REFERENCE, flipped=FLIPPED)
    assert _ceilings(flipped, 0, 32, 56) == [(0.8, 0, 32), (0.5, 32, 56)]
    assert _ceilings(REFERENCE, 0, 56, 56) == [(0.8, 0, 56)]
    plot_curves(curves(rows), flipped, "flip", tmp_path / "flip.png")
    assert (tmp_path / "flip.png").stat().st_size > 10_000


def test_long_runs_are_scored_every_8th_update() -> None:
    assert usual_score_at("all", 16) == [0, 8]
    assert usual_score_at("all", 64) == [0, 8, 16, 24, 32, 40, 48, 56]


@pytest.mark.parametrize("unit", ["updates", "rounds"])
def test_who_has_no_terminal_is_told_in_what_a_run_counts(unit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with shown(Console(file=io.StringIO()), 4, unit) as tell:
        tell("outcome seed 0", RunProgress(phase="agents try", update=1))

    assert capsys.readouterr().err == f"outcome seed 0: agents try: 1/4 {unit}\n"


def test_of_a_pretrained_model_the_tables_say_what_was_learned_of_the_gap_and_what_was_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [everyday_row(0.5, perplexity=20.0), everyday_row(0.26, perplexity=22.0, control=Control.SHUFFLED)]

    show(tables(rows, rows[0].reference))

    said = " ".join(capsys.readouterr().out.replace("│", " ").replace("┃", " ").split())
    assert "after 0 after 16 " in said
    assert "combined 0% 50% combined, shuffled 0% 10%" in said
    assert "combined 18.0, 0.80, 0.50 20.0, 0.70, 0.40 combined, shuffled 18.0, 0.80, 0.50 22.0, 0.70, 0.40" in said
    assert "hint in words held out 0.60 (0.56-0.64)" in said
    assert "combined, shuffled +0.10 +0.40 yes" in said
    assert "A request has 40 tokens; with the hint in its prompt it has 55" in said


def test_one_method_without_controls_has_one_table() -> None:
    assert len(tables([row(0.3, 0.5)], REFERENCE)) == 1


@pytest.mark.parametrize("num_ungraded", [0, 3])
def test_how_many_answers_a_language_model_gave_no_grade_is_said(
    num_ungraded: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = long_row({16: 0.7})
    assert row.outcome is not None
    scores = {16: replace(row.outcome.scores[16], num_problems=497, num_ungraded=num_ungraded)}
    graded = replace(row, outcome=replace(row.outcome, scores=scores))

    _say_where([graded], tmp_path / "curves.png", tmp_path)

    assert ("3 of 500 answers got no grade" in capsys.readouterr().err) is (num_ungraded > 0)


def test_the_help_says_which_section_set_changes() -> None:
    said = " ".join(CliRunner().invoke(app, ["learn", "--help"], env={"COLUMNS": "300"}).stdout.split())
    assert "A setting of the section training that no other option says, as kl=0.1, for all runs." in said
