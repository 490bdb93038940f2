"""The real SGLang is gone when its block ends, with everything it started."""

from pathlib import Path

import psutil
import pytest

from clawstream.local.servers.server_process import reserved
from tests.parts.engine.tiny_model import make_model
from tests.parts.sglang.process import sglang_engine


@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_no_process_of_the_server_is_left(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with reserved() as port, sglang_engine(make_model(tmp_path / "model"), port):
        started = set(psutil.Process().children(recursive=True)) - before
    assert len(started) >= 4  # watcher, server, scheduler, detokenizer
    assert psutil.wait_procs(started, timeout=5)[1] == []
