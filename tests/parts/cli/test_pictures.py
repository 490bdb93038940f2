"""`clawstream pictures` shows what is kept, and erases it for good."""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clawstream.cli import app
from clawstream.conversation.pictures import Picture
from clawstream.errors import ConfigError
from clawstream.gateway.picture_store import PictureStore
from clawstream.gateway.requests.pictures import ShownPicture
from tests.pictures import picture

OLD, NEW = picture(56, 56), picture(56, 56, red=0)
NAMES = [hashlib.sha256(data).hexdigest() for data in (OLD, NEW)]


@pytest.fixture
def store(tmp_path: Path) -> PictureStore:
    kept = PictureStore(tmp_path / "pictures")
    kept.put(
        ShownPicture(picture=Picture(sha256=name, width=56, height=56), data=data)
        for name, data in zip(NAMES, (OLD, NEW), strict=True)
    )
    two_days_ago_s = time.time() - 2 * 86_400
    os.utime(tmp_path / "pictures" / NAMES[0][:2] / NAMES[0], (two_days_ago_s, two_days_ago_s))
    return kept


def pictures(folder: Path, *words: str) -> Result:
    (folder / "clawstream.toml").write_text(f"data_dir = {json.dumps(str(folder))}\n")
    return CliRunner().invoke(app, ["-c", str(folder / "clawstream.toml"), "pictures", *words])


def names(store: PictureStore) -> list[str]:
    return [name for name, _, _ in store.kept()]


@pytest.mark.usefixtures("store")
def test_what_is_kept_is_shown_to_people_and_programs(tmp_path: Path) -> None:
    told = json.loads(pictures(tmp_path, "list", "--json").stdout)
    assert [(one["sha256"], one["bytes"]) for one in told] == sorted(
        (n, len(d)) for n, d in zip(NAMES, (OLD, NEW), strict=True)
    )
    assert all(name in pictures(tmp_path, "list").stdout for name in NAMES)
    (tmp_path / "empty").mkdir()
    assert pictures(tmp_path / "empty", "list", "--json").stdout == "[]\n"


def test_one_or_the_old_ones_are_erased(store: PictureStore, tmp_path: Path) -> None:
    assert "1 of 2 pictures were erased" in pictures(tmp_path, "erase", "--older-than", "1").stderr
    assert names(store) == NAMES[1:]
    assert "1 of 1 pictures were erased" in pictures(tmp_path, "erase", NAMES[1]).stderr
    assert names(store) == []


def test_a_picture_that_is_sent_again_is_not_old_any_more(store: PictureStore, tmp_path: Path) -> None:
    store.put([ShownPicture(picture=Picture(sha256=NAMES[0], width=56, height=56), data=OLD)])
    assert "0 of 2" in pictures(tmp_path, "erase", "--older-than", "1").stderr


@pytest.mark.parametrize("words", [(), (NAMES[0], "--older-than", "1"), (NAMES[0], "f" * 64)])
def test_what_is_not_clear_erases_nothing(store: PictureStore, tmp_path: Path, words: tuple[str, ...]) -> None:
    refused = pictures(tmp_path, "erase", *words)
    assert isinstance(refused.exception, ConfigError)
    assert "Nothing was erased" in str(refused.exception)
    assert sorted(names(store)) == sorted(NAMES)
