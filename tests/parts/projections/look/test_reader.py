"""Whoever looks can read the tables and views, and can do nothing else on the server, however a query is worded."""

import io
import logging
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine
from sqlalchemy.engine import make_url

from clawstream.errors import OperatorError
from clawstream.projections import accounts, database
from clawstream.projections.look.sql import RowFormat, print_query, rows_of
from clawstream.projections.tables import RELATIONS
from tests.parts.projections import one_session
from tests.parts.projections.reading import contents, write_all
from tests.unit.projections import logs


def dsn(url: str) -> str:
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


@pytest.fixture
def bystander(migrated_url: str) -> Iterator[psycopg.Connection]:
    """Another session of the account that writes, as each stage has one."""
    with psycopg.connect(dsn(migrated_url), autocommit=True) as connection:
        yield connection


ESCAPES = (
    "COPY (SELECT 1) TO PROGRAM 'touch {file}'",
    "COPY (SELECT 1) TO '{file}'",
    "DO $$ BEGIN COPY (SELECT 1) TO PROGRAM 'touch {file}'; END $$",
    "DO $$ BEGIN RESET ROLE; COPY (SELECT 1) TO PROGRAM 'touch {file}'; END $$",
    "DO $$ BEGIN RESET SESSION AUTHORIZATION; COPY (SELECT 1) TO PROGRAM 'touch {file}'; END $$",
    "DO $$ BEGIN EXECUTE 'SET SESSION AUTHORIZATION {writer}'; END $$",
    "DO $$ BEGIN SET LOCAL transaction_read_only = off; DELETE FROM votes; END $$",
    "DO $$ BEGIN ROLLBACK; DELETE FROM votes; COMMIT; END $$",
    "SET ROLE {writer}",
    "SET SESSION AUTHORIZATION {writer}",
    "SELECT set_config('role', '{writer}', false)",
    "SELECT set_config('session_authorization', '{writer}', false)",
    "SELECT pg_read_file('PG_VERSION')",
    "SELECT pg_read_binary_file('postgresql.conf')",
    "SELECT pg_ls_dir('.')",
    "SELECT lo_import('/etc/passwd')",
    "SELECT lo_export(1, '{file}')",
    "SELECT lo_from_bytea(0, 'x')",
    "SELECT pg_terminate_backend({pid})",
    "SELECT pg_cancel_backend({pid})",
    "SELECT pg_reload_conf()",
    "SELECT pg_rotate_logfile()",
    "SELECT rolpassword FROM pg_authid",
    "SELECT * FROM dblink('dbname=postgres', 'SELECT 1') AS t(a int)",
    "CREATE EXTENSION dblink",
    "ALTER ROLE CURRENT_USER SUPERUSER",
    "ALTER SYSTEM SET archive_command = 'touch {file}'",
    "CREATE FUNCTION mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "GRANT {writer} TO CURRENT_USER",
    "LOCK TABLE votes IN ACCESS EXCLUSIVE MODE",
)


def test_no_query_leaves_the_tables(
    emptied: Engine, migrated_url: str, bystander: psycopg.Connection, tmp_path: Path
) -> None:
    write_all(emptied, logs.records(one_session.ONE_SESSION))
    before, file = contents(emptied), tmp_path / "made"
    tmp_path.chmod(0o777)
    for escape in ESCAPES:
        query = escape.format(file=file, writer=make_url(migrated_url).username, pid=bystander.info.backend_pid)
        with pytest.raises(OperatorError, match=r"^Postgres refused the query: "):
            print_query(migrated_url, query, form=RowFormat.CSV, out=io.StringIO())
    assert not file.exists()
    assert bystander.execute("SELECT 1").fetchone() == (1,)
    assert contents(emptied) == before


def test_a_query_runs_as_an_account_that_has_no_power_over_the_server(migrated_url: str) -> None:
    [row] = rows_of(
        migrated_url,
        "SELECT session_user AS session, current_user AS role, rolsuper, rolcreaterole, rolcreatedb, rolreplication "
        "FROM pg_roles WHERE rolname = session_user",
    )
    assert row.pop("session") == row.pop("role") == f"{make_url(migrated_url).username}_reader"
    assert not any(row.values())


def test_a_query_sees_no_more_of_other_sessions_than_that_they_are_there(
    migrated_url: str, bystander: psycopg.Connection
) -> None:
    query = f"SELECT query FROM pg_stat_activity WHERE pid = {bystander.info.backend_pid}"
    assert rows_of(migrated_url, query) == [{"query": "<insufficient privilege>"}]


def test_every_table_and_view_that_there_is_can_be_read(migrated_url: str) -> None:
    found = rows_of(
        migrated_url,
        "SELECT relname, has_table_privilege(oid, 'SELECT') AS can_be_read FROM pg_class "
        "WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'v', 'm')",
    )
    assert {row["relname"] for row in found} == set(RELATIONS)
    assert all(row["can_be_read"] for row in found)


def test_a_table_of_somebody_else_in_the_same_schema_can_t_be_read(live: Engine) -> None:
    with live.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE salaries (amount int)")
    url = live.url.render_as_string(hide_password=False)
    database.upgrade(url)
    with pytest.raises(OperatorError, match="permission denied for table salaries"):
        rows_of(url, "SELECT * FROM salaries")


def test_the_reader_s_password_is_not_the_writer_s_and_follows_from_it() -> None:
    one, other = (accounts.address(f"postgresql://me:{password}@host/name") for password in ("a", "b"))
    assert (one.username, one.host, one.database) == ("me_reader", "host", "name")
    assert one.password not in (None, "a", other.password)
    assert accounts.address("postgresql://me:a@elsewhere/other").password == one.password
    assert accounts.address("postgresql://me@host/name").password is None
    assert len(accounts.address(f"postgresql://{'é' * 40}:a@host/name").username or "") <= 63


@pytest.fixture
def writer_url(fresh_database_url: str) -> Iterator[str]:
    """A database whose owner is no superuser and may make no accounts."""
    name, password = f"owner_{uuid.uuid4().hex[:12]}", uuid.uuid4().hex
    place = make_url(fresh_database_url)
    url = place.set(username=name, password=password).render_as_string(hide_password=False)
    with psycopg.connect(dsn(fresh_database_url), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")
        connection.execute(f"GRANT {name} TO CURRENT_USER")
        owner = f'ALTER DATABASE "{place.database}" OWNER TO'
        connection.execute(f"{owner} {name}")
    yield url
    with psycopg.connect(dsn(fresh_database_url), autocommit=True) as connection:
        connection.execute(f"{owner} CURRENT_USER")
        made = connection.execute("SELECT rolname FROM pg_roles WHERE rolname ^@ %s ORDER BY 1 DESC", (name,))
        for (role,) in made.fetchall():
            connection.execute(f"GRANT {role} TO CURRENT_USER; DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


def test_an_account_that_may_make_no_others_looks_in_a_transaction_that_only_reads_and_says_so(
    writer_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    database.upgrade(writer_url)
    name = make_url(writer_url).username
    with caplog.at_level(logging.WARNING):
        assert rows_of(writer_url, "SELECT session_user AS me") == [{"me": name}]
    assert f"no account {name}_reader" in caplog.text
    with pytest.raises(OperatorError, match="read-only transaction"):
        rows_of(writer_url, "DELETE FROM offsets")


def test_a_reader_that_somebody_else_makes_is_used(
    writer_url: str, fresh_database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    database.upgrade(writer_url)
    account = accounts.address(writer_url)
    with psycopg.connect(dsn(fresh_database_url), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {account.username} LOGIN PASSWORD '{account.password}'")
    with caplog.at_level(logging.WARNING):
        assert rows_of(writer_url, "SELECT session_user AS me") == [{"me": account.username}]
    assert caplog.text == ""


def test_a_reader_whose_password_is_of_an_older_one_of_the_writer_s_gets_the_new_one(
    fresh_database_url: str, writer_url: str
) -> None:
    name = make_url(writer_url).username
    with psycopg.connect(dsn(fresh_database_url), autocommit=True) as connection:
        connection.execute(f"ALTER ROLE {name} CREATEROLE")
        database.upgrade(writer_url)
        connection.execute(f"ALTER ROLE {name} PASSWORD 'another'")
    changed = make_url(writer_url).set(password="another").render_as_string(hide_password=False)
    assert rows_of(changed, "SELECT session_user AS me") == [{"me": f"{name}_reader"}]


def test_no_query_is_run_as_a_reader_that_has_power_over_the_server(
    writer_url: str, fresh_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.upgrade(writer_url)
    account = accounts.address(writer_url)
    with psycopg.connect(dsn(fresh_database_url), autocommit=True) as connection:
        # The tests' account can give nobody a real power, so one of its own stands for it.
        connection.execute(f"CREATE ROLE {make_url(writer_url).username}_power")
        connection.execute(f"CREATE ROLE {account.username} LOGIN PASSWORD '{account.password}'")
        connection.execute(f"GRANT {make_url(writer_url).username}_power TO {account.username}")
    monkeypatch.setattr(accounts, "POWERS", [f"{make_url(writer_url).username}_power"])
    with pytest.raises(OperatorError, match=rf"{account.username} can do what .*_power can .*No query was run"):
        rows_of(writer_url, "SELECT 1")


def test_a_reader_logs_in_by_itself_for_a_bounded_time_and_can_write_nothing(migrated_url: str) -> None:
    account = accounts.address(migrated_url).render_as_string(hide_password=False)
    with closing(psycopg.connect(dsn(account), autocommit=True)) as connection:
        assert connection.execute("SHOW statement_timeout").fetchone() == (accounts.STATEMENT_TIMEOUT,)
        connection.execute("SET default_transaction_read_only = off")
        connection.execute("SET transaction_read_only = off")
        for statement in ("DELETE FROM votes", "CREATE TABLE mine ()", "ALTER TABLE votes ADD COLUMN mine int"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)
    assert rows_of(account, "SELECT session_user AS me") == [{"me": make_url(account).username}]
