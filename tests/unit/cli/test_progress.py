"""How far runs are is seen on a narrow terminal, and which score they have."""

import io
import re
import time

from rich.console import Console

from clawstream.cli.learning.progress import shown, waiting
from clawstream.simulation.runs.run import RunProgress


def test_a_terminal_of_80_columns_shows_each_run_s_updates_and_score() -> None:
    page = io.StringIO()
    console = Console(file=page, width=80, force_terminal=True, legacy_windows=False)
    long = "students chat, the policy learns"
    with shown(console, 16) as tell:
        for name in ("combined, current teacher seed 3", "binary shuffled seed 11"):
            tell(name, RunProgress(phase=long, update=5, score=0.61, requests=1234, tokens_per_s=1000.0))
    for name in ("combined, current teacher seed 3", "binary shuffled seed 11"):
        line = next(line for line in page.getvalue().splitlines() if name in line and "5/16" in line)
        assert "5/16 updates" in line
        assert "score 0.61" in line


def test_a_terminal_sees_that_time_passes_while_the_base_is_scored_and_a_file_each_word_once() -> None:
    page = io.StringIO()
    console = Console(file=page, width=80, force_terminal=True, color_system=None, legacy_windows=False)
    with waiting(console) as say:
        say("scoring the base")
        deadline = time.monotonic() + 20
        while not re.search(r"0:00:0[1-9] scoring the base", page.getvalue()) and time.monotonic() < deadline:
            time.sleep(0.05)
        seen = len(page.getvalue())
        assert time.monotonic() < deadline, page.getvalue()
        say("scoring it with the hint")
    assert "scoring it with the hint" in page.getvalue()[seen:]
    file = io.StringIO()
    with waiting(Console(file=file, width=80)) as say:
        say("scoring the base")
    assert file.getvalue() == "scoring the base\n"
