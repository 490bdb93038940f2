"""The schema is checked before anything is read or written."""

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, text

from clawstream.errors import ConfigError, DatabaseMismatch, PartUnavailable
from clawstream.projections import database
from clawstream.projections.tables import metadata


def test_an_empty_database_is_refused_and_the_message_names_the_command(fresh_database_url: str) -> None:
    engine = database.connect(fresh_database_url)
    with pytest.raises(DatabaseMismatch, match=r"has no tables .* revision \d+ is expected.*clawstream db upgrade"):
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


def test_a_database_of_before_the_first_release_is_refused_in_words(fresh_database_url: str) -> None:
    database.upgrade(fresh_database_url)
    engine = database.connect(fresh_database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0018'"))
    engine.dispose()
    with pytest.raises(DatabaseMismatch, match=r"let postgres\.url name an empty database"):
        database.upgrade(fresh_database_url)


def test_an_upgrade_adds_the_tables_and_columns_that_are_new_and_keeps_rows_and_what_rests_on_the_views(
    live: Engine,
) -> None:
    url = live.url.render_as_string(hide_password=False)
    with live.begin() as connection:
        connection.exec_driver_sql("DROP TABLE pins")
        connection.exec_driver_sql("ALTER TABLE steps DROP COLUMN entropy_nats")
        connection.exec_driver_sql("ALTER TABLE replays DROP COLUMN teacher")
        connection.exec_driver_sql("INSERT INTO offsets (topic, partition, next_offset, epoch) VALUES ('t', 0, 1, 1)")
        connection.exec_driver_sql("CREATE VIEW of_others AS SELECT reward FROM lineage")
    with pytest.raises(DatabaseMismatch, match=r"lacks .*steps\.entropy_nats.*replays\.teacher.*db upgrade"):
        database.check(live)
    database.upgrade(url)
    database.check(live)
    with live.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert connection.exec_driver_sql("SELECT count(*) FROM of_others").scalar() == 0
        assert connection.exec_driver_sql("SELECT next_offset FROM offsets").scalar() == 1


def test_an_upgrade_to_another_revision_makes_the_views_as_they_are_now(live: Engine) -> None:
    with live.begin() as connection:
        now = connection.exec_driver_sql("SELECT pg_get_viewdef('hint_memory'::regclass)").scalar()
        columns = ", ".join(connection.exec_driver_sql("SELECT * FROM hint_memory").keys())
        connection.exec_driver_sql("ALTER VIEW hint_memory RENAME TO former")
        connection.exec_driver_sql(f"CREATE VIEW hint_memory AS SELECT {columns} FROM former")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '1'")
    database.upgrade(live.url.render_as_string(hide_password=False))
    with live.connect() as connection:
        assert connection.exec_driver_sql("SELECT pg_get_viewdef('hint_memory'::regclass)").scalar() == now
