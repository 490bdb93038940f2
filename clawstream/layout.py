"""Tables on terminals of any width: no word is ever split, so an id that a person copies is whole.

A column is at least as wide as its widest word. Where the terminal has no room for that, each cell of a row is printed
on a line of its own; the terminal wraps that line, and it is copied in one piece. A table that is printed to a file is
as wide as it needs.
"""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_NO_EDGE = 100_000  # characters: wider than any cell


def show(console: Console, table: Table) -> None:
    """Print `table` in the form that there is room for."""
    wide = console.options.update(width=_NO_EDGE)
    natural = Measurement.get(console, wide, table)
    if not console.is_terminal:
        console.width = max(console.width, natural.maximum)
    if natural.minimum > console.width:
        for text in _records(console, table):
            console.print(text, soft_wrap=True)
        return
    if natural.maximum > console.width:
        _share(console, table, natural)
    console.print(table)


def _share(console: Console, table: Table, natural: Measurement) -> None:
    """Make each column as wide as its widest word, and share the rest out by how much more each could use."""
    wide = console.options.update(width=_NO_EDGE)
    least, most = [], []
    for header, *cells in _columns(console, table):
        measured = [Measurement.get(console, wide, text) for text in (header, *cells)]
        least.append(max(one.minimum for one in measured))
        most.append(max(one.maximum for one in measured))
    left, wanted = console.width - natural.minimum, sum(most) - sum(least)
    for column, narrow, broad in zip(table.columns, least, most, strict=True):
        column.width, column.overflow = narrow + left * (broad - narrow) // wanted, "fold"


def _records(console: Console, table: Table) -> Iterator[Text]:
    columns = _columns(console, table)
    if table.title is not None:
        yield _text(console, table.title)
    for row in range(1, table.row_count + 1):
        if table.show_header:
            yield from _lines([(column[0], column[row]) for column in columns if column[row].plain])
            yield Text()
    if not table.show_header:
        yield from _lines(zip(*(column[1:] for column in columns), strict=True))
    if table.caption is not None:
        yield _text(console, table.caption)


def _lines(rows: Iterable[Sequence[Text]]) -> Iterator[Text]:
    """Yield each row as a line; the first cells are padded to the width of the widest."""
    rows = list(rows)
    width = max((first.cell_len for first, *_ in rows), default=0)
    for first, *others in rows:
        name = first.copy()
        name.align("left", width)
        yield Text("  ").join((name, *others))


def _columns(console: Console, table: Table) -> list[list[Text]]:
    """Return each column's header, and its cells."""
    shown = table.show_header
    return [
        [_text(console, column.header if shown else ""), *(_text(console, cell) for cell in column.cells)]
        for column in table.columns
    ]


def _text(console: Console, cell: object) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell))
