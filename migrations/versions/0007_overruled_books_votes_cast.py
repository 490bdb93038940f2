"""Books that a rebuild did not follow, as a person said; votes that all runs of a replay have cast."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the table and the column; nothing was overruled before, and those votes were not counted."""
    op.add_column("replay_ends", sa.Column("num_votes_cast", sa.BigInteger))
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
