"""The accounts of clawstream's database: the one that owns the tables, and the one that may only read.

The first account of a server stays a superuser for ever, so on our own server everything is given to the account
`stages`. A read-only transaction does not confine a superuser: COPY can start programs in it. So people read through
the account `<account>_reader`, which `database.upgrade` makes with a password derived from the writing account's. A
query can't leave that account, as its session never had another. Where it can't be made, the writing account reads in
a read-only transaction, unless it has powers over the server that such a transaction does not take away.
"""

import hashlib
import logging
from functools import cache

import psycopg
from psycopg import sql
from sqlalchemy import URL, Connection, Engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, OperationalError

from clawstream.errors import OperatorError, PartUnavailable
from clawstream.projections.tables import RELATIONS

STATEMENT_TIMEOUT = "10min"  # of the reader's own sessions; `clawstream sql` sets less
_SUFFIX = "_reader"
_MOST_NAME_BYTES = 63
POWERS = [
    "pg_execute_server_program", "pg_read_server_files", "pg_write_server_files", "pg_signal_backend",
    "pg_checkpoint", "pg_create_subscription", "pg_maintain",
]  # fmt: skip
_POWERFUL = text(
    "SELECT rolname FROM pg_roles WHERE (rolsuper OR rolreplication OR rolname = ANY(:powers)) "
    "AND pg_has_role(current_user, oid, 'MEMBER') ORDER BY NOT rolsuper, rolname LIMIT 1"
)
_MAY = text("SELECT coalesce(has_table_privilege(to_regclass('alembic_version'), :what), false)")
_HIDDEN = text(
    "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'v') "
    "AND relname = ANY(:names) AND NOT has_table_privilege(:reader, oid, 'SELECT')"
)
_KNOWN = text("SELECT 1 FROM pg_roles WHERE rolname = :name")
_IS_SUPERUSER = text("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
_PLACE = text(
    "SELECT current_database(), current_schema(), has_database_privilege(:reader, current_database(), 'CONNECT'), "
    "has_schema_privilege(:reader, current_schema(), 'USAGE')"
)

_log = logging.getLogger(__name__)


def address(url: str) -> URL:
    """Return the URL by which the reader of the account in `url` logs in."""
    writer = make_url(url)
    account = (writer.username or "clawstream").encode()[: _MOST_NAME_BYTES - len(_SUFFIX)].decode(errors="ignore")
    name = account + _SUFFIX
    # Where the writer has no password, the server identifies accounts by other means, the reader's too.
    password = None if writer.password is None else derived_password(str(writer.password), name)
    return writer.set(username=name, password=password)


def make(connection: Connection, url: str) -> bool:
    """Let the reader of the account in `url` read all tables and views; False: this account may not make a reader.

    The transaction of `connection` goes on in both cases.
    """
    reader = address(url)
    assert reader.username is not None
    try:
        with connection.begin_nested():
            if connection.execute(_KNOWN, {"name": reader.username}).first() is None:
                _create(connection, reader)
            _grant(connection, reader.username)
    except (psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation):
        return make(connection, url)  # the upgrade of another database has made it meanwhile
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


def reading(reader: Engine, writer: Engine) -> Engine:
    """Return the engine for queries: that of the account `reader` (made if missing), or else that of `writer`.

    Raises OperatorError where `writer` would be used and has power over the server.
    """
    chosen = reader if is_there(reader, writer) else writer
    with chosen.connect() as connection:
        powerful = connection.execute(_POWERFUL, {"powers": POWERS}).scalar()
    if powerful is not None:
        raise OperatorError(
            f"{chosen.url.username} can do what {powerful} can on the server of this database, so no query is run with "
            f"it, and there is no account {reader.url.username} that may only read. No query was run. Let "
            f"postgres.url name an account that is no superuser, or create {reader.url.username} with the password "
            "that `clawstream db url --read-only` prints"
        )
    return chosen


def is_there(reader: Engine, writer: Engine) -> bool:
    """Return whether the account `reader` can read; a missing one is made, or the failure is logged."""
    return _can_read(reader) or _made(writer, reader)


@cache
def derived_password(password: str, name: str) -> str:
    """Return the password of the account `name`, derived from another account's `password`."""
    # Slow on purpose: people get the result, and could try to guess the writer's password from it.
    return hashlib.scrypt(password.encode(), salt=f"clawstream {name}".encode(), n=2**14, r=8, p=1)[:24].hex()


def _can_read(reader: Engine) -> bool:
    try:
        with reader.connect() as connection:
            return bool(connection.execute(_MAY, {"what": "SELECT"}).scalar())
    except OperationalError:
        return False  # if the database itself is away, the writer's query will say so


def _made(writer: Engine, reader: Engine) -> bool:
    """Make the reader, with the password that it is to have, and say whether it can read."""
    url = writer.url.render_as_string(hide_password=False)
    try:
        with writer.begin() as connection:
            if not connection.execute(_MAY, {"what": "INSERT"}).scalar():
                return False  # the writer is a reader itself
            make(connection, url)
        if _can_read(reader):
            return True
        with writer.begin() as connection:  # the reader's password may derive from an older one of the writer
            _set_password(connection, reader.url)
    except (psycopg.Error, DBAPIError) as error:
        _log.debug("state=reader_not_made reason=%r", str(error))
    if _can_read(reader):
        return True
    _log.warning(
        "there is no account %s that may only read, and %s can't make it: the query runs as %s, in a read-only "
        "transaction. `clawstream db url --read-only` prints the password that the missing account is to have",
        reader.url.username, writer.url.username, writer.url.username,
    )  # fmt: skip
    return False


def _create(connection: Connection, reader: URL) -> None:
    name = sql.Identifier(reader.username or "")
    driver = driver_of(connection)
    for statement in (
        "CREATE ROLE {} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS",
        "ALTER ROLE {} SET default_transaction_read_only = on",
        f"ALTER ROLE {{}} SET statement_timeout = '{STATEMENT_TIMEOUT}'",
    ):
        driver.execute(sql.SQL(statement).format(name))
    if not connection.execute(_IS_SUPERUSER).scalar():  # so that the writer may end the reader's sessions
        driver.execute(sql.SQL("GRANT {} TO CURRENT_USER").format(name))
    _set_password(connection, reader)


def _set_password(connection: Connection, reader: URL) -> None:
    if reader.password is None:
        return
    driver, name = driver_of(connection), reader.username or ""
    scrambled = _scrambled(driver, name, str(reader.password))
    driver.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(name), scrambled))


def _scrambled(driver: psycopg.Connection, name: str, password: str) -> sql.Literal:
    # Scrambled here, so that the password stands in no log of the server.
    return sql.Literal(driver.pgconn.encrypt_password(password.encode(), name.encode(), b"scram-sha-256").decode())


def _grant(connection: Connection, name: str) -> None:
    """Grant only missing rights: a grant waits for sessions that use the table."""
    driver, reader = driver_of(connection), sql.Identifier(name)
    database, schema, connects, uses = connection.execute(_PLACE, {"reader": name}).one()
    names = {"reader": reader, "database": sql.Identifier(database), "schema": sql.Identifier(schema)}
    if not connects:
        driver.execute(sql.SQL("GRANT CONNECT ON DATABASE {database} TO {reader}").format(**names))
    if not uses:
        driver.execute(sql.SQL("GRANT USAGE ON SCHEMA {schema} TO {reader}").format(**names))
    if schema != "public":
        driver.execute(sql.SQL("ALTER ROLE {reader} IN DATABASE {database} SET search_path = {schema}").format(**names))
    for relation in connection.execute(_HIDDEN, {"names": list(RELATIONS), "reader": name}).scalars():
        whole = sql.Identifier(schema, relation)
        driver.execute(sql.SQL("GRANT SELECT ON {} TO {reader}").format(whole, **names))


def driver_of(connection: Connection) -> psycopg.Connection:
    """Return the driver's connection below SQLAlchemy's."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return driver


OWNER = "stages"
# CREATEROLE, as the owner makes the read-only account; it can grant only rights that it has itself.
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
            f"Postgres at {superuser.host}:{superuser.port} refused to make the account {OWNER}, which is to own the "
            f"tables: {error}. Nothing was started"
        ) from error
    return superuser.set(username=OWNER, password=password).render_as_string(hide_password=False)


def _make(connection: psycopg.Connection, password: str) -> None:
    if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (OWNER,)).fetchone() is None:
        scrambled = _scrambled(connection, OWNER, password)
        connection.execute(sql.SQL(f"CREATE ROLE {OWNER} {_RIGHTS} PASSWORD {{}}").format(scrambled))


def _give(connection: psycopg.Connection, database: str) -> None:
    """Give the owner the database and everything that the superuser made in it."""
    connection.execute(sql.SQL(f"ALTER DATABASE {{}} OWNER TO {OWNER}").format(sql.Identifier(database)))
    for kind, schema, name, arguments in connection.execute(_OURS).fetchall():
        whole = sql.Identifier(*(str(part) for part in (schema, name) if part is not None))
        called = sql.SQL("" if arguments is None else f"({arguments})")
        connection.execute(sql.SQL(f"ALTER {kind} {{}}{{}} OWNER TO {OWNER}").format(whole, called))
