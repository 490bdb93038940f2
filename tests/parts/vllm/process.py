"""A real vLLM server on the CPU, gone with all of its processes afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawstream.local.servers.server_process import ServerProcess
from tests.parts.sglang.process import wait_until_ready
from tests.parts.vllm.installation import vllm_installation

_GRACE_S = 20.0
# What docs/vllm.md tells operators to start it with.
ENVIRONMENT = ("VLLM_SERVER_DEV_MODE=1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
FLAGS = (
    "--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details",
    "--enable-lora", "--max-loras", "2", "--max-lora-rank", "16",
)  # fmt: skip
# What a machine with two cores and no GPU needs, and no network.
_HERE = (
    "CUDA_VISIBLE_DEVICES=", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1",
    "VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1", "VLLM_LOGGING_LEVEL=WARNING",
)  # fmt: skip
_OPTIONS = ("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--block-size", "32")


@contextmanager
def vllm_engine(
    model: Path, port: int, *arguments: str, flags: tuple[str, ...] = FLAGS, environment: tuple[str, ...] = ENVIRONMENT
) -> Iterator[str]:
    """Yield the URL of a server that is ready; it needs one to three minutes for that."""
    python = vllm_installation()
    log = model.parent / f"vllm-{port}.log"
    command = [
        "env", *_HERE, *environment, str(python), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--port", str(port), *_OPTIONS, *flags, *arguments,
    ]  # fmt: skip
    server = ServerProcess(command, folder=model.parent, log=log, grace_s=_GRACE_S)
    try:
        wait_until_ready(server, port, "vLLM")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()
