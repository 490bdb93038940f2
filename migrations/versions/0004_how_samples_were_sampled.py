"""How a sample's answer was sampled."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the column; rows of events that did not say have none of it."""
    op.add_column("samples", sa.Column("sampling", postgresql.JSONB))
