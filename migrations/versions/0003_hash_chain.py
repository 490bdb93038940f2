"""A hash chain over what was read of each partition."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the books; the chain of a partition that was read before begins where it is read on."""
    op.add_column("offsets", sa.Column("chain", sa.LargeBinary))
    op.add_column("offsets", sa.Column("chain_from", sa.BigInteger))
    op.create_table(
        "chain_blocks",
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("block", sa.BigInteger, nullable=False),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        sa.Column("chain", sa.LargeBinary, nullable=False),
        sa.Column("marks", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("topic", "partition", "block"),
    )
