"""The schema's revision is checked before anything is read or written."""

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from clawstream.errors import ConfigError, DatabaseMismatch, PartUnavailable
from clawstream.projections import database
from clawstream.projections.tables import metadata


def test_an_empty_database_is_refused_and_the_message_names_the_command(fresh_database_url: str) -> None:
    engine = database.connect(fresh_database_url)
    with pytest.raises(DatabaseMismatch, match=r"has no tables .* revision 0010 is expected.*clawstream db upgrade"):
        database.check(engine)
    engine.dispose()


def test_after_an_upgrade_the_tables_are_those_of_the_metadata(fresh_database_url: str) -> None:
    assert database.upgrade(fresh_database_url) == database.expected_revision()
    engine = database.connect(fresh_database_url)
    database.check(engine)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_an_upgrade_of_an_upgraded_database_changes_nothing(fresh_database_url: str) -> None:
    database.upgrade(fresh_database_url)
    assert database.upgrade(fresh_database_url) == database.expected_revision()


def test_a_database_of_a_newer_version_is_refused_by_check_and_by_upgrade(fresh_database_url: str) -> None:
    database.upgrade(fresh_database_url)
    engine = database.connect(fresh_database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseMismatch, match=r"revision 9999, which this version does not know.*newer clawstream"):
        database.check(engine)
    engine.dispose()
    with pytest.raises(DatabaseMismatch, match="9999"):
        database.upgrade(fresh_database_url)


def test_a_server_that_is_away_is_named_without_its_password() -> None:
    with pytest.raises(PartUnavailable, match=r"127\.0\.0\.1:1/none does not answer") as caught:
        database.upgrade("postgresql://me:secret@127.0.0.1:1/none")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["not a url", "mysql://me:secret@host/name"])
def test_another_kind_of_url_is_a_config_error_without_the_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"expected postgresql\+psycopg://") as caught:
        database.connect(url)
    assert "secret" not in str(caught.value)
