"""What decides does no I/O and knows neither clock nor chance.

A module is pure where its docstring says "Pure", and in the folders of what decides for the stages in any case.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import clawstream

PACKAGE = Path(clawstream.__file__).parent
DECIDING = ("conversation", "events", "groups", "judging", "refresh", "samples", "turns")
EDGES = ("stage.py", "answering.py")  # in those folders: they bring clock and peers to the rest
FORBIDDEN = (
    "aiohttp", "aiokafka", "asyncio", "clawstream.config", "clawstream.inference.sglang",
    "clawstream.stream.kafka.kafka_log", "clawstream.stream.runner.hosting", "clawstream.stream.stage.now_ms",
    "httpx", "os", "psycopg", "random", "secrets", "socket", "sqlite3", "subprocess", "threading",
    "time", "uuid.uuid1", "uuid.uuid4",
)  # fmt: skip


def is_pure(module: Path) -> bool:
    docstring = module.read_text().partition('"""')[2].partition('"""')[0]
    decides = module.relative_to(PACKAGE).parts[0] in DECIDING and module.name not in EDGES
    return decides or "Pure" in docstring


def imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, "imports name their module in full"  # noqa: PT018
            yield from (node.module, *(f"{node.module}.{name.name}" for name in node.names))


def impure(source: str) -> set[str]:
    found = {*imported(source)}
    return {name for name in FORBIDDEN if any(f"{one}.".startswith(f"{name}.") for one in found)}


def test_a_pure_module_imports_neither_io_nor_clock_nor_chance() -> None:
    pure = [module for module in sorted(PACKAGE.rglob("*.py")) if is_pure(module)]
    assert set(DECIDING) <= {module.relative_to(PACKAGE).parts[0] for module in pure}
    found = {str(module.relative_to(PACKAGE)): impure(module.read_text()) for module in pure}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}, "have the caller bring what these give"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os.path", {"os"}),
        ("def f():\n    from time import monotonic", {"time"}),
        ("from clawstream import config, errors", {"clawstream.config"}),
        ("from clawstream.stream.kafka.kafka_log import KafkaLog", {"clawstream.stream.kafka.kafka_log"}),
        ("import timeit, ossaudiodev\nfrom clawstream.events import Event", set()),
    ],
)
def test_an_import_is_seen_however_it_is_written(source: str, found: set[str]) -> None:
    assert impure(source) == found
