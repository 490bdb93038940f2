"""Answers given anew: what was to be, what was, and their samples; views that tell of turns leave those out."""

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, REAL

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the column and the tables; views gain their columns at their end."""
    op.add_column("samples", sa.Column("refreshed_id", sa.Text))
    _session_facts(
        "refresh_asks",
        sa.Column("sample_id", sa.Text, nullable=False),
        sa.Column("policy_id", sa.Text, nullable=False),
        sa.Column("prompt_ids", ARRAY(sa.Integer), nullable=False),
        sa.Column("sampling", JSONB, nullable=False),
        sa.Column("asked_at_ms", sa.BigInteger, nullable=False),
    )
    _session_facts(
        "refreshed_answers",
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("policy_id", sa.Text, nullable=False),
        sa.Column("sampling", JSONB, nullable=False),
        sa.Column("versions", JSONB, nullable=False),
        sa.Column("message", JSONB),
        sa.Column("output_ids", ARRAY(sa.Integer), nullable=False),
        sa.Column("output_logprobs", ARRAY(REAL), nullable=False),
        sa.Column("finish_reason", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("answered_at_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("refreshed_answers_by_turn", "refreshed_answers", ["turn_id"])
    cursor = op.get_bind().connection.cursor()
    cursor.execute((Path(__file__).parent / "0012_views.sql").read_text())


def _session_facts(name: str, *columns: sa.Column[object]) -> None:
    op.create_table(
        name,
        sa.Column("event_id", sa.Uuid, primary_key=True),
        sa.Column("source_topic", sa.Text, nullable=False),
        sa.Column("source_partition", sa.Integer, nullable=False),
        sa.Column("source_offset", sa.BigInteger, nullable=False),
        sa.Column("log_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("turn_id", sa.Text, nullable=False),
        *columns,
    )
    op.create_index(f"{name}_in_session_order", name, ["session_id", "source_partition", "source_offset"])
