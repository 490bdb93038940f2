"""The view `adapters` names an agent's adapter in full, KEY+AGENT. All views are made anew after this."""

revision = "3"
down_revision = "2"


def upgrade() -> None:
    """Change nothing: clawstream/projections/database.py makes the views where the revision is another."""
