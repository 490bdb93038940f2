"""How far runs are is seen on a narrow terminal, and which score they have."""

import io

from rich.console import Console

from clawstream.cli.progress import shown
from clawstream.simulation.run import Progress


def test_a_terminal_of_80_columns_shows_each_run_s_updates_and_score() -> None:
    page = io.StringIO()
    console = Console(file=page, width=80, force_terminal=True, legacy_windows=False)
    long = "students chat, the policy learns"
    with shown(console, 16) as tell:
        for name in ("combined, current teacher seed 3", "binary shuffled seed 11"):
            tell(name, Progress(phase=long, update=5, score=0.61, requests=1234, tokens_per_s=1000.0))
    for name in ("combined, current teacher seed 3", "binary shuffled seed 11"):
        line = next(line for line in page.getvalue().splitlines() if name in line and "5/16" in line)
        assert "5/16 updates" in line
        assert "score 0.61" in line
