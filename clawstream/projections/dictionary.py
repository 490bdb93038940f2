"""Writes the meanings in docs/dictionary.md as comments into the database, and makes a page from such comments."""

from dataclasses import dataclass
from itertools import groupby

from psycopg import sql
from sqlalchemy import Connection, text

from clawstream.projections.accounts import driver_of
from clawstream.projections.tables import RELATION_MEANINGS, RELATIONS, meaning

_KINDS = {"r": "TABLE", "v": "VIEW"}
_FOUND = text("""
    SELECT relname, relkind::text, obj_description(c.oid, 'pg_class'),
        attname, format_type(atttypid, atttypmod), col_description(c.oid, attnum)
    FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
    WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'v') AND relname = ANY(:relations)
        AND attnum > 0 AND NOT attisdropped
    ORDER BY relkind DESC, relname, attnum
""")
_HEAD = """# Data dictionary

What stands in the database. The same words are comments there, so that SQL tools show them (`\\d+ exchanges` in psql).
How to get in: [inspect.md](inspect.md#with-other-tools). NULL is a value of its own, never a zero. Texts and JSON are
stored with U+241B, a small u and four hex digits for the few characters that Postgres can't hold.

Printed by `clawstream db dictionary`.
"""


@dataclass(frozen=True, slots=True)
class _Column:
    relation: str
    kind: str
    relation_comment: str | None
    name: str
    type: str
    comment: str | None


def describe(connection: Connection) -> None:
    """Set the comment of each table, view and column of the current schema."""
    statements = []
    for relation, columns in groupby(_columns(connection), lambda column: column.relation):
        found = list(columns)
        words, kind = RELATION_MEANINGS.get(relation), _KINDS[found[0].kind]
        if found[0].relation_comment != words:
            name = sql.Identifier(relation)
            statements.append(sql.SQL(f"COMMENT ON {kind} {{}} IS {{}}").format(name, sql.Literal(words)))
        for column in found:
            words = meaning(relation, column.name)
            if column.comment != words:
                name = sql.Identifier(relation, column.name)
                statements.append(sql.SQL("COMMENT ON COLUMN {} IS {}").format(name, sql.Literal(words)))
    if statements:
        driver_of(connection).execute(sql.SQL("; ").join(statements))


def page(connection: Connection) -> str:
    """Return a page, in Markdown, of the current schema with its comments."""
    parts = [_HEAD]
    for kind, title in (("v", "Views"), ("r", "Tables")):
        parts.append(f"\n## {title}\n")
        of_kind = [column for column in _columns(connection) if column.kind == kind]
        for relation, columns in groupby(of_kind, lambda column: column.relation):
            found = list(columns)
            parts.append(f"\n### `{relation}`\n\nA row is {found[0].relation_comment or '(not said)'}.\n\n")
            parts.append("| column | type | |\n|---|---|---|\n")
            parts += [f"| `{column.name}` | {column.type} | {column.comment or ''} |\n" for column in found]
    return "".join(parts)


def _columns(connection: Connection) -> list[_Column]:
    return [_Column(*row) for row in connection.execute(_FOUND, {"relations": list(RELATIONS)})]
