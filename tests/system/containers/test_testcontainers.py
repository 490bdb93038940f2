"""The servers of the tests as testcontainers starts them, through the socket of an engine."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import make_url

from tests import servers
from tests.system.containers import images
from tests.system.containers.test_compose import had

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    podman = had()
    images.make(podman, tmp_path_factory.mktemp("images"))
    with podman.service() as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", address)
        patch.setenv("TESTCONTAINERS_RYUK_DISABLED", "true")  # its image is of a registry
        patch.setenv("TESTCONTAINERS_CONNECTION_MODE", "docker_host")  # it may take this machine for a container
        for variable in ("CLAWSTREAM_KAFKA", "CLAWSTREAM_POSTGRES"):
            patch.delenv(variable, raising=False)
        patch.setattr(servers, "KAFKA_IMAGE", images.KAFKA)
        patch.setattr(servers, "POSTGRES_IMAGE", images.POSTGRES)
        assert servers.docker_answers()
        yield


@pytest.mark.usefixtures("engine")
def test_where_an_engine_answers_the_tests_have_their_broker_from_a_container(tmp_path: Path) -> None:
    with servers.kafka(tmp_path) as bootstrap:
        assert servers.answers(bootstrap)
    assert not servers.answers(bootstrap)
    assert [*tmp_path.iterdir()] == []  # our own broker would have its data here


@pytest.mark.usefixtures("engine")
def test_where_an_engine_answers_the_tests_have_their_database_from_a_container(tmp_path: Path) -> None:
    with servers.postgres(tmp_path) as url, servers.database(url, "another") as other:
        dsn = make_url(other).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(dsn) as connection:
            assert connection.execute("SELECT current_database()").fetchone() == ("another",)
    assert [*tmp_path.iterdir()] == []
