"""`clawstream openclaw` as its users call it, in a home of its own."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clawstream.cli import app
from tests.unit.openclaw.connect.texts import Run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / ".openclaw" / "openclaw.json"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in [name for name in os.environ if name.startswith("OPENCLAW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENCLAW_HOME", str(tmp_path))
    monkeypatch.setenv("CLAWSTREAM_DATA_DIR", str(tmp_path / "data"))
    settings = tmp_path / "clawstream.toml"
    settings.write_text('[gateway]\nport = 1\napi_key = "s3cret"\n')

    def invoke(*argv: str) -> Result:
        return CliRunner().invoke(app, ["--config", str(settings), "openclaw", *argv])

    return invoke
