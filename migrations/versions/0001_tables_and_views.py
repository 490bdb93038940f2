"""Tables for every topic, and the views that join them."""

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make everything; the schema holds nothing of ours yet."""
    cursor = op.get_bind().connection.cursor()
    for name in ("0001_tables.sql", "0001_views.sql"):
        cursor.execute((Path(__file__).parent / name).read_text())
