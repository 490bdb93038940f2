"""Answers that their clients left: what was sent of them, and turns that say so."""

from pathlib import Path

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Add the columns; views gain theirs at their end, and the rows of such answers."""
    op.add_column("exchanges", sa.Column("num_sent_tokens", sa.BigInteger))
    op.add_column("turns", sa.Column("interrupted", sa.Boolean))
    cursor = op.get_bind().connection.cursor()
    cursor.execute((Path(__file__).parent / "0017_views.sql").read_text())
