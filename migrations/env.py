"""Alembic's entry: runs the revisions on the connection that clawstream/projections/database.py hands over."""

from alembic import context
from sqlalchemy import Connection

from clawstream.projections.tables import metadata

connection = context.config.attributes.get("connection")
assert isinstance(connection, Connection), "run `clawstream db upgrade`: there is no alembic.ini"
context.configure(connection=connection, target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
