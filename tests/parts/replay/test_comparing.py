"""What a comparison counts, and that nothing missing counts as a score."""

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import VerdictReached, VerdictStatus
from clawstream.replay.comparing import compare
from clawstream.replay.running import write_csv, write_plot

Scores = dict[str, int | None]
SCORED = st.dictionaries(st.sampled_from(["a", "b", "c", "d", "e"]), st.sampled_from([-1, 0, 1, None]))


def verdicts(scores: Scores, judge: str) -> list[VerdictReached]:
    return [
        VerdictReached(
            session_id="s", turn_id=turn_id, judge=judge, prompt_version="p", revision=0,
            status=VerdictStatus.BELOW_QUORUM if score is None else VerdictStatus.DECIDED, score=score,
            num_positive=0, num_neutral=0, num_negative=0, num_unreadable=0, num_failed=0,
        )
        for turn_id, score in scores.items()
    ]  # fmt: skip


def figures(live: Scores, again: Scores) -> dict[str, float | int | str | None]:
    turn_ids = frozenset("abcde")
    return compare(verdicts(live, "old"), verdicts(again, "new"), turn_ids=turn_ids).figures()


def test_four_turns_of_which_one_flipped_and_one_is_missing_on_either_side() -> None:
    found = figures({"a": 1, "b": -1, "c": 1, "d": 0}, {"a": 1, "b": 1, "c": 1, "e": -1})
    assert (found["turns"], found["turns_scored_by_both"], found["turns_scored_differently"]) == (5, 3, 1)
    assert (found["turns_missing_in_replay"], found["turns_missing_live"]) == (1, 1)
    assert found["agreement"] == pytest.approx(2 / 3)
    assert found["score_drift"] == pytest.approx(2 / 3)
    assert (found["live_judge"], found["replay_judge"]) == ("old", "new")


@given(SCORED, SCORED)
def test_a_turn_without_a_score_moves_no_mean(live: Scores, again: Scores) -> None:
    found = figures(live, again)
    both = [name for name in live.keys() & again.keys() if live[name] is not None and again[name] is not None]
    assert found["turns_scored_by_both"] == len(both)
    assert (found["mean_score_live"] is None) == (not both)
    assert found["turns"] == len(live.keys() | again.keys())


@given(SCORED)
def test_who_judges_the_same_agrees_in_everything(scores: Scores) -> None:
    found = figures(scores, scores)
    assert found["turns_scored_differently"] == found["turns_missing_in_replay"] == found["turns_missing_live"] == 0
    assert found["agreement"] in (None, 1.0)
    assert found["kappa"] is None or found["kappa"] == pytest.approx(1.0)


def test_turns_that_the_replay_did_not_read_are_not_missing_from_it() -> None:
    found = compare(verdicts({"a": 1, "z": 1}, "old"), verdicts({"a": 1}, "new"), turn_ids=frozenset("a"))
    assert found.figures()["turns_missing_in_replay"] == 0


def test_the_files_have_a_row_for_each_turn_and_a_picture(tmp_path: Path) -> None:
    found = compare(verdicts({"a": 1, "b": None}, "old"), verdicts({"a": -1}, "new"), turn_ids=frozenset("ab"))
    write_csv(found, tmp_path / "turns.csv")
    write_plot(found, tmp_path / "scores.png")
    with (tmp_path / "turns.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["turn_id"], row["live_score"], row["replay_score"]) for row in rows] == [
        ("a", "1", "-1"),
        ("b", "", ""),
    ]
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")
