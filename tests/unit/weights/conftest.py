"""What the tests of takeovers share."""

from pathlib import Path

import pytest

from clawstream.events import PolicyPublished
from tests.unit.monitoring.said import published
from tests.unit.weights.engines import Weights


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    """Publish versions that lie on disk."""

    def at(version: int) -> PolicyPublished:
        folder = tmp_path / str(version)
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        return published(version, str(folder))

    return at
