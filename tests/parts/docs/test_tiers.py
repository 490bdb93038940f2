"""Tests stand in three tiers: `unit` is pure, `parts` has one real part, `system` whole installations and clients."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TIERS = ("unit", "parts", "system")
HEAVY = ("torch", "transformers", "renderers")


def imported(file: Path) -> set[str]:
    """The modules that a file names in its imports, wherever they stand in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize(("tier", "above"), [("unit", TIERS[1:]), ("parts", TIERS[2:])])
def test_a_tier_takes_nothing_from_the_tiers_above_it(tier: str, above: tuple[str, ...]) -> None:
    taken = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in (ROOT / "tests" / tier).rglob("*.py")
        for name in imported(file)
        for other in above
        if name == f"tests.{other}" or name.startswith(f"tests.{other}.")
    }
    assert not taken


@pytest.mark.slow
def test_collecting_the_pure_tests_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import pytest, sys\n"
        "code = pytest.main(['--collect-only', '-qq', '-n', '0', '-p', 'no:cacheprovider', 'tests/unit'])\n"
        f"print('LOADED', *(name for name in {HEAVY} if name in sys.modules), 'END', int(code))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert found.stdout.splitlines()[-1] == "LOADED END 0", found.stdout[-2000:] + found.stderr[-2000:]


def test_each_test_stands_in_a_tier() -> None:
    stray = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if file.relative_to(ROOT).parts[1] not in TIERS
    ]
    assert not stray
