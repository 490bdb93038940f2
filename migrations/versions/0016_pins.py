"""Versions of a policy that are kept, however many come after them."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Add the table; until now none was pinned."""
    op.create_table(
        "pins",
        sa.Column("event_id", sa.Uuid, primary_key=True),
        sa.Column("source_topic", sa.Text, nullable=False),
        sa.Column("source_partition", sa.Integer, nullable=False),
        sa.Column("source_offset", sa.BigInteger, nullable=False),
        sa.Column("log_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("policy_id", sa.Text, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("policy_version", sa.BigInteger, nullable=False),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("asked_at_ms", sa.BigInteger, nullable=False),
    )
