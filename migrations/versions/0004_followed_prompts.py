"""The view `hint_memory` counts a hint as said where somebody said it. All views are made anew after this."""

revision = "4"
down_revision = "3"


def upgrade() -> None:
    """Change nothing: clawstream/projections/database.py makes the views where the revision is another."""
