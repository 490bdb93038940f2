"""The meaning of each table, view and column, read from docs/dictionary.md: the comments in the database.

The words are written on that page only; a test compares it with the database.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from clawstream.resources import folder

_RELATION = re.compile(r"^### `(\w+)`\n\nA row is (.+)\.$", re.MULTILINE)
_COLUMN = re.compile(r"^\| `(\w+)` \| .+? \| (.+) \|$", re.MULTILINE)


def _read(page: str) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """Return the meaning of a row of each relation, and of each of its columns."""
    relations: dict[str, str] = {}
    columns: dict[tuple[str, str], str] = {}
    _, *parts = _RELATION.split(page)
    for name, row, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        relations[name] = row
        columns |= {(name, column): words for column, words in _COLUMN.findall(body)}
    return relations, columns


_relations, _columns = _read((folder("docs") / "dictionary.md").read_text())
RELATIONS: Mapping[str, str] = MappingProxyType(_relations)


def meaning(relation: str, column: str) -> str | None:
    """Return the meaning of a column of a table or view; None where the page has none."""
    return _columns.get((relation, column))
