"""The first release. A new database is made by clawstream/projections/database.py, whole and as it is now."""

revision = "1"  # "0001" to "0018" are of databases from before the first release
down_revision = None


def upgrade() -> None:
    """Change nothing: no database that is known is older."""
