"""Who asked by which key, how much of a prompt stands as it was sampled, and which versions are adapters."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the columns; rows of events that did not say have none of it."""
    op.add_column("exchanges", sa.Column("key_name", sa.Text))
    op.add_column("exchanges", sa.Column("num_spliced", sa.BigInteger))
    op.add_column("feedback", sa.Column("key_name", sa.Text))
    op.add_column("policies", sa.Column("adapter", sa.Text))
    op.add_column("activations", sa.Column("adapter", sa.Text))
