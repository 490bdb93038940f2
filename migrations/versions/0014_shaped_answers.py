"""What shaped an answer beside its temperature is part of how it was sampled; until now nothing did."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0014"
down_revision = "0013"

_TABLES = ("exchanges", "samples", "refresh_asks", "refreshed_answers")


def upgrade() -> None:
    """Have rows of before say what the same records say when they are read again."""
    unshaped = sa.cast(sa.literal('{"shaping": null}', sa.Text), JSONB)
    for name in _TABLES:
        table = sa.table(name, sa.column("sampling", JSONB))
        older = sa.func.jsonb_typeof(table.c.sampling) == "object", ~table.c.sampling.has_key("shaping")
        op.execute(table.update().where(*older).values(sampling=table.c.sampling.concat(unshaped)))
