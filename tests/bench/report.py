"""Where the figures of a measurement go."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer


def report(figures: Mapping[str, Any], json_file: Path | None) -> None:
    """Print the figures as JSON, and write them to `json_file` where one is named."""
    text = json.dumps(figures, indent=1)
    typer.echo(text)
    if json_file is not None:
        json_file.write_text(text + "\n")
