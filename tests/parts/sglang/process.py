"""A real SGLang server on a machine without a GPU, gone with all of its processes afterwards."""

import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawstream.local.servers.server_process import ServerProcess
from tests.parts.sglang.installation import sglang_installation

READY_WITHIN_S = 600.0
_GRACE_S = 20.0
# Idle, it sleeps instead of keeping a core busy. With overlap, a token that was on its way when the weights changed
# is named after the new ones: the version of a token is exact without.
OPTIONS = (
    "--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native",
    "--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle", "--max-total-tokens", "65536",
    "--incremental-streaming-output", "--log-level", "warning",
)  # fmt: skip


@contextmanager
def sglang_engine(model: Path, port: int, *arguments: str) -> Iterator[str]:
    """Yield the URL of a server that is ready; it needs about 45 s for that."""
    installed = sglang_installation()
    log = model.parent / f"sglang-{port}.log"
    libraries = os.pathsep.join(filter(None, (str(installed.stub), os.environ.get("LD_LIBRARY_PATH"))))
    command = [
        "env", f"LD_LIBRARY_PATH={libraries}", "SGLANG_USE_CPU_ENGINE=1",
        str(installed.python), "-m", "sglang.launch_server",
        "--model-path", str(model), "--port", str(port), *OPTIONS, *arguments,
    ]  # fmt: skip
    # Schedulers and detokenizer are processes of their own in its group, which the leash ends as a whole.
    server = ServerProcess(command, folder=model.parent, log=log, grace_s=_GRACE_S)
    try:
        wait_until_ready(server, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


def wait_until_ready(server: ServerProcess, port: int, name: str = "SGLang", page: str = "/health") -> None:
    """Return once its health is good; raises AssertionError with the end of its log."""
    end = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < end:
        if (status := server.exit_status()) is not None:
            raise AssertionError(f"{name} ended with {status}:\n{server.log_tail(30)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{page}", timeout=10) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.25)
    raise AssertionError(f"no {name} on port {port} after {READY_WITHIN_S:g} s:\n{server.log_tail(30)}")
