"""The benchmark's commands, and what one of them imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.__main__ import COMMANDS, app

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_command_imports_nothing_of_another() -> None:
    code = "import sys; from tests.bench.__main__ import app; app(['rebuild']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_without_one_all_are_offered() -> None:
    assert tuple(command.name for command in app([]).registered_commands) == COMMANDS
