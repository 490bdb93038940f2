"""The view `hint_memory` says of a hint that a step lost how open it is since. All views are made anew after this."""

revision = "2"
down_revision = "1"


def upgrade() -> None:
    """Change nothing: clawstream/projections/database.py makes the views where the revision is another."""
