"""Records that the projector has read and that have no row, because they or one before them can't be used."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the table; what was set aside before stands in the dead-letter queues alone."""
    op.create_table(
        "set_aside",
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("source_offset", sa.BigInteger, nullable=False),
        sa.Column("log_time_ms", sa.BigInteger, nullable=False),
        sa.Column("record_key", sa.LargeBinary),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("attempt", sa.BigInteger, nullable=False),
        sa.Column("fate", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("topic", "partition", "source_offset"),
    )
