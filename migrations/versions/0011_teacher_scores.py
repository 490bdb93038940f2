"""What an engine that is the teacher makes of hinted answers, by itself and in the samples that rest on it."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, REAL

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Add the table and the columns; until now the trainer was the only teacher."""
    op.create_table(
        "teacher_scores",
        sa.Column("event_id", sa.Uuid, primary_key=True),
        sa.Column("source_topic", sa.Text, nullable=False),
        sa.Column("source_partition", sa.Integer, nullable=False),
        sa.Column("source_offset", sa.BigInteger, nullable=False),
        sa.Column("log_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("turn_id", sa.Text, nullable=False),
        sa.Column("judge", sa.Text, nullable=False),
        sa.Column("prompt_version", sa.Text, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("teacher", sa.Text, nullable=False),
        sa.Column("scored_sha256", sa.Text, nullable=False),
        sa.Column("policy_id", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("teacher_logprobs", ARRAY(REAL)),
        sa.Column("student_logprobs", ARRAY(REAL)),
        sa.Column("student_version", sa.BigInteger),
        sa.Column("error", sa.Text),
        sa.Column("latency_ms", sa.BigInteger, nullable=False),
        sa.Column("scored_at_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("teacher_scores_by_turn", "teacher_scores", ["turn_id"])
    op.create_index(
        "teacher_scores_in_session_order", "teacher_scores", ["session_id", "source_partition", "source_offset"]
    )
    op.add_column("samples", sa.Column("teacher", sa.Text))
    op.add_column("samples", sa.Column("teacher_logprobs", ARRAY(REAL)))
    op.add_column("samples", sa.Column("student_logprobs", ARRAY(REAL)))
    op.add_column("samples", sa.Column("student_version", sa.BigInteger))
    op.add_column("replays", sa.Column("teacher", sa.Text))
