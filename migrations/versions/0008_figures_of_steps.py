"""What a step did to the policy: its entropy, its answers' length, how far engines were off, what was changed."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the columns; steps of older versions did not say."""
    for name in ("entropy_nats", "behaviour_kl_nats", "mean_response_tokens", "weights_changed_share"):
        op.add_column("steps", sa.Column(name, sa.Double))
