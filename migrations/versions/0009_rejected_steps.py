"""Steps whose outcome was not published, beside the versions that engines did not take over; rollbacks."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Tell the two kinds of rejection apart, until now there was one; nothing was ever rolled back."""
    op.add_column("rejections", sa.Column("kind", sa.Text, nullable=False, server_default="engine"))
    op.alter_column("rejections", "kind", server_default=None)
    op.alter_column("rejections", "engine", nullable=True)
    op.add_column("rejections", sa.Column("num_samples", sa.BigInteger))
    op.add_column("rejections", sa.Column("step_ms", sa.BigInteger))
    op.add_column("batches", sa.Column("rollback", sa.BigInteger))
    op.create_table(
        "rollbacks",
        sa.Column("event_id", sa.Uuid, primary_key=True),
        sa.Column("source_topic", sa.Text, nullable=False),
        sa.Column("source_partition", sa.Integer, nullable=False),
        sa.Column("source_offset", sa.BigInteger, nullable=False),
        sa.Column("log_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("policy_id", sa.Text, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("to_version", sa.BigInteger, nullable=False),
        sa.Column("asked_at_ms", sa.BigInteger, nullable=False),
    )
