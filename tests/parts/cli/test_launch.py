"""`clawstream launch --dry-run` asks the driver how large the GPUs are, where nobody says it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clawstream.cli import app
from tests.bench.qwen3_sizes import config


def test_where_nobody_says_how_large_the_gpus_are_the_driver_is_asked_or_it_is_said_that_nothing_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3-4b")))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("GPU_GB", raising=False)
    launch = ["launch", "--dry-run", "--hf-ckpt", str(tmp_path)]
    shown = CliRunner().invoke(app, launch)
    assert shown.exit_code == 0, shown.output
    assert "whether it fits is not checked: nvidia-smi does not say" in shown.stderr

    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 81559\necho 16000\n")
    driver.chmod(0o755)
    assert "does not fit on 8x16.78GB" in str(CliRunner().invoke(app, launch).exception)
