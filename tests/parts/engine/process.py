"""The CPU engine as users run it: a process of its own on a free port."""

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY_WITHIN_S = 110.0


@contextmanager
def cpu_engine(model: Path, port: int, *arguments: str) -> Iterator[str]:
    """Yield the URL of an engine that is ready; its process has ended afterwards."""
    command = [sys.executable, "-m", "clawstream.local.engine", "--model-path", str(model), "--port", str(port)]
    with (model.parent / f"engine-{port}.log").open("wb") as log:
        process = subprocess.Popen([*command, *arguments], stdout=log, stderr=log)
        try:
            wait_until_ready(process, port, Path(log.name))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            code = process.wait(timeout=20)
        assert code == 0, f"the engine ended with {code}:\n{Path(log.name).read_text()}"


def wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    """Return once the server on the port says that it is ready."""
    end = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise AssertionError(f"the engine ended with {process.returncode}:\n{log.read_text()}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise AssertionError(f"no engine on port {port} after {READY_WITHIN_S} s:\n{log.read_text()}")
