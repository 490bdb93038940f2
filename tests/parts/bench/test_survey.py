"""A survey that was cut off goes on to what it would have found, and never with answers that were asked otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from clawstream.local.packaged_model import convert
from tests.bench.survey import Asked, rows, survey
from tests.parts.local.tiny_gguf import make_gguf

BIKE = "How do I patch the tube of a bicycle?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    convert(make_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").file, folder)
    return folder


def surveyed(model: Path, report: Path, num_requests: int, *, seed: int = 0) -> dict[str, Any]:
    wishes = "one_sentence,lower_case"
    survey(model, report, wanted=wishes, num_requests=num_requests, max_tokens=6, at_once=4, seed=seed)
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_a_survey_that_goes_on_finds_what_one_that_was_not_cut_off_finds(model: Path, tmp_path: Path) -> None:
    surveyed(model, tmp_path / "cut.json", 1)
    again, whole = (surveyed(model, tmp_path / name, 3) for name in ("cut.json", "whole.json"))
    by_question = [sorted(map(json.dumps, found["asked"])) for found in (again, whole)]
    assert by_question[0] == by_question[1]
    assert [row["requests"] for row in again["rows"]] == [3, 3]


def test_answers_that_were_asked_otherwise_are_not_gone_on_with(model: Path, tmp_path: Path) -> None:
    before = surveyed(model, tmp_path / "report.json", 1)
    with pytest.raises(typer.BadParameter, match=r"asked with \{'seed': 0\}"):
        surveyed(model, tmp_path / "report.json", 3, seed=1)
    assert json.loads((tmp_path / "report.json").read_text()) == before


def test_a_hint_s_share_is_beside_that_of_the_same_requests_without_one() -> None:
    def asked(wish: str | None, request: str, answer: str) -> Asked:
        hint = None if wish is None else "Say it briefly."
        return Asked(wish=wish, request=request, hint=hint, answer=answer, num_tokens=9, finished=True)

    long = "Take the wheel off the bicycle. Then find the hole. Glue a patch on it."
    (row,) = rows(
        [
            asked(None, BIKE, long),
            asked("one_sentence", BIKE, "Glue a patch on the tube of the bicycle."),
            asked(None, "Why is the sea salty?", "Rivers bring salt to the sea."),  # nobody was asked that with a hint
        ]
    )
    assert (row["without"]["won"], row["with_hint"]["won"], row["won_moved"], row["requests"]) == (0, 1, 1, 1)
