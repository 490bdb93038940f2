"""The base that each policy begins with."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Add the table; until now no base was named."""
    op.create_table(
        "bases",
        sa.Column("event_id", sa.Uuid, primary_key=True),
        sa.Column("source_topic", sa.Text, nullable=False),
        sa.Column("source_partition", sa.Integer, nullable=False),
        sa.Column("source_offset", sa.BigInteger, nullable=False),
        sa.Column("log_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("policy_id", sa.Text, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("model_sha256", sa.Text),
        sa.Column("tokenizer_sha256", sa.Text),
        sa.Column("named_at_ms", sa.BigInteger, nullable=False),
    )
