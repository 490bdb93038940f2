"""On a terminal of 80 columns no word of a table is split; what has no room is a line a cell."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clawstream.layout import show


def printed(table: Table, *, terminal: bool = True, columns: int = 80) -> str:
    page = io.StringIO()
    show(Console(file=page, width=columns, force_terminal=terminal, color_system=None, legacy_windows=False), table)
    return page.getvalue()


WORDS = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=50)
CELLS = st.lists(WORDS, max_size=12).map(" ".join)


@given(
    cells=st.integers(1, 6).flatmap(lambda num: st.lists(st.lists(CELLS, min_size=num, max_size=num), max_size=4)),
    header=WORDS,
    columns=st.sampled_from([20, 80, 200]),
)
def test_each_word_is_whole_on_a_terminal_of_any_width(cells: list[list[str]], header: str, columns: int) -> None:
    table = Table()
    for number in range(len(cells[0]) if cells else 1):
        table.add_column(Text(f"{header}{number}"))
    for row in cells:
        table.add_row(*map(Text, row))
    seen = set(printed(table, columns=columns).split())
    assert {word for row in cells for cell in row for word in cell.split()} <= seen
    if cells and any(cells[0]):
        assert any(one.startswith(header) for one in seen)


def test_a_row_that_has_no_room_is_a_line_a_cell_and_a_file_has_no_edge() -> None:
    table = Table("session", "turn", "score", title="Last verdicts")
    table.add_row("s" * 60, "t" * 60, "1")
    table.add_row("other", "", "-1")
    assert printed(table).splitlines() == [
        "Last verdicts",
        f"session  {'s' * 60}",
        f"turn     {'t' * 60}",
        "score    1",
        "",
        "session  other",
        "score    -1",
        "",
    ]
    assert f"│ {'s' * 60} │ {'t' * 60} │ 1     │" in printed(table, terminal=False)


def test_what_has_no_header_is_a_line_a_row() -> None:
    table = Table(show_header=False)
    table.add_row("postgres", "p" * 90)
    table.add_row("kafka", "k")
    assert printed(table).splitlines() == [f"postgres  {'p' * 90}", "kafka     k"]


def test_prose_takes_the_room_that_ids_leave() -> None:
    table = Table("turn", "why")
    table.add_row("t" * 36, "the gradient is not finite, so these samples are used up and nothing is published")
    lines = printed(table).splitlines()
    assert {len(line) for line in lines} == {80}
    assert any("t" * 36 in line for line in lines)
    assert len(lines) <= 8
