"""The schema's revision is checked before anything is read or written."""

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from clawstream.errors import ConfigError, DatabaseMismatch, PartUnavailable
from clawstream.projections import database
from clawstream.projections.tables import metadata
from clawstream.resources import folder


def test_an_empty_database_is_refused_and_the_message_names_the_command(fresh_database_url: str) -> None:
    engine = database.connect(fresh_database_url)
    with pytest.raises(DatabaseMismatch, match=r"has no tables .* revision 0018 is expected.*clawstream db upgrade"):
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


def test_an_upgrade_gives_old_samples_their_judges_reward_and_keeps_what_rests_on_the_views(
    fresh_database_url: str,
) -> None:
    upgraded_to(fresh_database_url, "0009")
    engine = database.connect(fresh_database_url)
    with engine.begin() as connection:
        connection.execute(text(OLD_SAMPLE), {"id": "11111111-1111-4111-8111-111111111111", "reward": -1})
        connection.execute(text(OLD_SAMPLE), {"id": "22222222-2222-4222-8222-222222222222", "reward": None})
        connection.execute(text("CREATE VIEW of_others AS SELECT reward FROM lineage"))
    database.upgrade(fresh_database_url)
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT reward, total_reward, num_feedback FROM samples ORDER BY sample_id"))
        assert list(rows) == [(-1, -1.0, None), (None, None, None)]
        assert connection.execute(text("SELECT standing FROM sample_revisions")).scalars().all() == ["unplanned"] * 2
        assert connection.execute(text("SELECT count(*) FROM of_others")).scalar() == 0
    engine.dispose()


OLD_SAMPLE = """
    INSERT INTO samples (event_id, source_topic, source_partition, source_offset, log_time, session_id, turn_id, judge,
        prompt_version, revision, reward, prompt_ids, response_ids, response_logprobs, trained, temperature, policy_id,
        versions, num_earlier_turns)
    VALUES (CAST(:id AS uuid), 'clawstream.samples.v1', 0, 0, now(), 's', :id, 'judge', '1', 0, :reward, '{1}', '{2}',
        '{-0.5}', '{1}', 1, 'policy', '[]', 0)
"""


def upgraded_to(url: str, revision: str) -> None:
    """The database as an older version left it."""
    config = Config()
    config.set_main_option("script_location", str(folder("migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    engine = database.connect(url)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    engine.dispose()
