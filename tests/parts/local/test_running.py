"""Other commands find a running installation, and no other."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clawstream.errors import PartUnavailable
from clawstream.local.running import Addresses, PartState, addresses_of, alone_on, announced, read_parts, write_parts

ADDRESSES = Addresses(
    supervisor_pid=1,
    kafka="127.0.0.1:9092",
    postgres="postgresql://me:secret@127.0.0.1/db",
    engines=("http://127.0.0.1:1", "http://127.0.0.1:2"),
    gateway="http://127.0.0.1:3",
    monitor="http://127.0.0.1:4",
)
PART = PartState(name="turns", pid=7, restarts=1, since_ms=5, failure=None)
KILLED = """
import os, pathlib, signal, sys
from clawstream.local.running import Addresses, alone_on, announced
data_dir = pathlib.Path(sys.argv[1])
with alone_on(data_dir), announced(data_dir, Addresses(**eval(sys.argv[2]))):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_installation_is_found_while_it_runs_and_not_after(tmp_path: Path) -> None:
    assert addresses_of(tmp_path) is None
    with alone_on(tmp_path):
        assert addresses_of(tmp_path) is None
        with announced(tmp_path, ADDRESSES):
            assert addresses_of(tmp_path) == ADDRESSES
        assert addresses_of(tmp_path) is None


def test_an_installation_that_was_killed_is_not_found(tmp_path: Path) -> None:
    fields = {name: getattr(ADDRESSES, name) for name in ADDRESSES.__slots__}
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), repr(fields)], check=False)
    assert (tmp_path / "run.json").exists()
    assert addresses_of(tmp_path) is None


def test_a_second_installation_on_a_data_folder_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(PartUnavailable, match="in use by another clawstream")
    with alone_on(tmp_path), refused, alone_on(tmp_path):
        pass


def test_addresses_are_for_this_user_alone_as_they_hold_a_password(tmp_path: Path) -> None:
    with alone_on(tmp_path), announced(tmp_path, ADDRESSES):
        assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o600


def test_parts_are_read_as_they_were_written_and_forgotten_by_the_next_installation(tmp_path: Path) -> None:
    with alone_on(tmp_path):
        write_parts(tmp_path, [PART])
        assert read_parts(tmp_path) == (PART,)
    with alone_on(tmp_path):
        assert read_parts(tmp_path) == ()
