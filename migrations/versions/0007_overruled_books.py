"""Books of the projector that a rebuild did not follow, since a person said that the log is right."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the table; nothing was overruled before."""
    op.create_table(
        "overruled",
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("overruled_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        sa.Column("chain", sa.LargeBinary),
        sa.Column("made_next_offset", sa.BigInteger, nullable=False),
        sa.Column("made_chain", sa.LargeBinary),
        sa.Column("kept_schema", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("topic", "partition", "overruled_at"),
    )
