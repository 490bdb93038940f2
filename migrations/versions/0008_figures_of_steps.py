"""What a step did to the policy, and what a replay makes of answers that were not drawn from the policy."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the columns; records of older versions did not say."""
    for name in ("entropy_nats", "behaviour_kl_nats", "mean_response_tokens", "weights_changed_share"):
        op.add_column("steps", sa.Column(name, sa.Double))
    op.add_column("replays", sa.Column("off_distribution", sa.Text))
