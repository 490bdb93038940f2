"""Replays of the log, which samples a policy is trained on, and whose samples a batch is made of."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the tables of the control topic; batches planned before are of live samples."""
    op.add_column("batches", sa.Column("replay", sa.Text))
    _table(
        "replays",
        _must("replay", sa.Text),
        _must("votes_from", sa.Text),
        sa.Column("judge", sa.Text),
        sa.Column("prompt_version", sa.Text),
        sa.Column("session_id", sa.Text),
        _must("num_votes", sa.BigInteger),
        _must("quorum", sa.BigInteger),
        _must("ranges", JSONB),
        _must("started_at_ms", sa.BigInteger),
    )
    _table(
        "replay_ends",
        _must("replay", sa.Text),
        *(_must(f"num_{of}", sa.BigInteger) for of in _COUNTED),
        _must("samples_sha256", sa.Text),
        _must("ended_at_ms", sa.BigInteger),
    )
    _table(
        "promotions",
        _must("policy_id", sa.Text),
        _must("number", sa.BigInteger),
        sa.Column("replay", sa.Text),
        sa.Column("undoes", sa.BigInteger),
        _must("promoted_at_ms", sa.BigInteger),
    )


_COUNTED = ("exchanges", "turns", "verdicts", "hints", "samples", "refused", "calls", "unusable")


def _must(name: str, kind: type) -> sa.Column[object]:
    return sa.Column(name, kind, nullable=False)


def _table(name: str, *columns: sa.Column[object]) -> None:
    op.create_table(
        name,
        sa.Column("event_id", sa.Uuid, primary_key=True),
        _must("source_topic", sa.Text),
        _must("source_partition", sa.Integer),
        _must("source_offset", sa.BigInteger),
        _must("log_time", sa.DateTime(timezone=True)),
        *columns,
    )
