"""The account that owns clawstream's database on a server of our own, and is no superuser.

A cluster's first account is a superuser for ever, so everything it owns is given to another account. On somebody else's
server this is that person's task.
"""

import psycopg
from psycopg import sql
from sqlalchemy.engine import make_url

from clawstream.errors import PartUnavailable
from clawstream.projections.reader import derived_password

OWNER = "stages"
# CREATEROLE: it makes the read-only account. It can grant only rights that it has itself.
_RIGHTS = "LOGIN NOSUPERUSER CREATEDB CREATEROLE NOREPLICATION NOBYPASSRLS"
_OURS = """
    SELECT 'SCHEMA', nspname, NULL, NULL FROM pg_namespace
    WHERE nspowner = current_user::regrole AND nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'
    UNION ALL
    SELECT CASE relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END, nspname, relname, NULL
    FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE relowner = current_user::regrole AND relkind IN ('r', 'v')
        AND nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'
    UNION ALL
    SELECT 'FUNCTION', nspname, proname, pg_get_function_identity_arguments(pg_proc.oid)
    FROM pg_proc JOIN pg_namespace ON pg_namespace.oid = pronamespace
    WHERE proowner = current_user::regrole AND nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'
"""


def url_of_owner(url: str) -> str:
    """Return the URL of the account that owns everything in the database; `url` names the superuser's.

    A missing account is made. Raises PartUnavailable where the server refuses.
    """
    superuser = make_url(url)
    password = derived_password(str(superuser.password), OWNER)
    try:
        with psycopg.connect(
            superuser.set(drivername="postgresql").render_as_string(hide_password=False)
        ) as connection:
            _make(connection, password)
            _give(connection, str(superuser.database))
    except psycopg.Error as error:
        raise PartUnavailable(
            f"Postgres at {superuser.host}:{superuser.port} did not let the account {OWNER} be made, which owns the "
            f"tables: {error}. Nothing was started"
        ) from error
    return superuser.set(username=OWNER, password=password).render_as_string(hide_password=False)


def _make(connection: "psycopg.Connection[tuple[object, ...]]", password: str) -> None:
    if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (OWNER,)).fetchone() is None:
        scrambled = connection.pgconn.encrypt_password(password.encode(), OWNER.encode(), b"scram-sha-256").decode()
        connection.execute(sql.SQL(f"CREATE ROLE {OWNER} {_RIGHTS} PASSWORD {{}}").format(sql.Literal(scrambled)))


def _give(connection: "psycopg.Connection[tuple[object, ...]]", database: str) -> None:
    """Give the owner the database and everything that the superuser made in it."""
    connection.execute(sql.SQL(f"ALTER DATABASE {{}} OWNER TO {OWNER}").format(sql.Identifier(database)))
    for kind, schema, name, arguments in connection.execute(_OURS).fetchall():
        whole = sql.Identifier(*(str(part) for part in (schema, name) if part is not None))
        called = sql.SQL("" if arguments is None else f"({arguments})")
        connection.execute(sql.SQL(f"ALTER {kind} {{}}{{}} OWNER TO {OWNER}").format(whole, called))
