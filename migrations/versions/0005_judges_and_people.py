"""The view `judge_agreement` says how a judge does against people. All views are made anew after this."""

revision = "5"
down_revision = "4"


def upgrade() -> None:
    """Change nothing: clawstream/projections/database.py makes the views where the revision is another."""
