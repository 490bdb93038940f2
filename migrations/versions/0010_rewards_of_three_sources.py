"""Rewards of what judges, people, environments and heuristics said; the revision that was planned; groups."""

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add the columns; until now the judge's part was the whole of a reward. Views gain theirs at their end."""
    for name in ("total_reward", "person_reward", "environment_reward", "heuristic_reward"):
        op.add_column("samples", sa.Column(name, sa.Double))
    op.add_column("samples", sa.Column("num_feedback", sa.BigInteger))
    for table, numbers in (("exchanges", ("group_size", "step_index")), ("samples", ("step_index",))):
        op.add_column(table, sa.Column("group_id", sa.Text))
        for name in numbers:
            op.add_column(table, sa.Column(name, sa.BigInteger))
    op.execute("UPDATE samples SET total_reward = reward WHERE reward IS NOT NULL")
    op.add_column("batches", sa.Column("turns", JSONB))
    op.add_column("batches", sa.Column("advantages", ARRAY(sa.Double)))
    op.add_column("replays", sa.Column("reward_weights", JSONB))
    op.add_column("replays", sa.Column("hint_quorum", sa.BigInteger))
    op.add_column("replays", sa.Column("heuristic_function", sa.Text))
    cursor = op.get_bind().connection.cursor()
    for name in ("0010_views.sql", "0010_groups.sql"):
        cursor.execute((Path(__file__).parent / name).read_text())
