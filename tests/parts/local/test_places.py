"""One server to a folder, and no folder is emptied that is not ours."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clawstream.errors import PartUnavailable
from clawstream.local.servers import accounts


def test_a_claimed_folder_is_refused_to_a_second_server(tmp_path: Path) -> None:
    refused = pytest.raises(PartUnavailable, match="in use by another clawstream")
    with accounts.claimed(tmp_path), refused, accounts.claimed(tmp_path, within_s=0.1):
        pass


def test_a_claim_lasts_as_long_as_a_process_holds_its_descriptor(tmp_path: Path) -> None:
    with accounts.claimed(tmp_path) as lock_fd:
        server = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=(lock_fd,)
        )
    with pytest.raises(PartUnavailable), accounts.claimed(tmp_path, within_s=0.1):
        pass
    server.communicate(timeout=10)
    with accounts.claimed(tmp_path, within_s=0.1):
        pass


def test_a_folder_of_somebody_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    refused = pytest.raises(PartUnavailable, match=r"holds thesis\.tex, which clawstream did not write")
    with refused, accounts.claimed(tmp_path, fresh=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_fresh_empties_a_folder_of_ours_and_nothing_that_it_points_to(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "ours"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    with accounts.claimed(folder):
        (folder / "data").mkdir()
        (folder / "data" / "segment").touch()
        (folder / "link").symlink_to(elsewhere)
    with accounts.claimed(folder):
        assert (folder / "data" / "segment").exists()
    with accounts.claimed(folder, fresh=True):
        assert [path.name for path in folder.iterdir()] == [".clawstream-lock"]
    assert (elsewhere / "kept").exists()


def test_an_address_is_found_only_while_the_folder_is_claimed(tmp_path: Path) -> None:
    assert accounts.address_in(tmp_path / "never made") is None
    with accounts.claimed(tmp_path):
        assert accounts.address_in(tmp_path) is None
        accounts.publish(tmp_path, "127.0.0.1:9092")
        assert accounts.address_in(tmp_path) == "127.0.0.1:9092"
    assert accounts.address_in(tmp_path) is None


def test_the_address_of_an_earlier_server_is_not_taken_for_that_of_a_starting_one(tmp_path: Path) -> None:
    with accounts.claimed(tmp_path):
        accounts.publish(tmp_path, "127.0.0.1:9092")
    with accounts.claimed(tmp_path):
        assert accounts.address_in(tmp_path) is None


def test_an_address_is_for_the_eyes_of_its_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        accounts.publish(tmp_path, "postgresql://user:password@host/name")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "address").stat().st_mode) == 0o600
