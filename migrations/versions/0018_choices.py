"""Answers of one request that stand beside each other."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Add the column; until now a request had one answer."""
    op.add_column("exchanges", sa.Column("choice_of", sa.Text))
