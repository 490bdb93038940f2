"""Starts the CPU engine and serves it until it is told to stop or its worker ends."""

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import torch
import uvicorn
from tokenizers import Tokenizer

from clawstream.errors import PartUnavailable
from clawstream.inference.service import AppServer, build_app
from clawstream.local.engine.backend import CpuBackend
from clawstream.local.engine.core import Core, EngineWorker
from clawstream.local.engine.model import SMALL_PARAMETERS, RowModel
from clawstream.local.engine.rows import Decode

log = logging.getLogger(__name__)

_AT_ONCE, _LARGE_AT_ONCE = 64, 16  # requests; of SmolLM2 each takes 47 MB for 1,024 tokens
# The worker releases the interpreter at every tensor operation; the event loop should not keep it for 5 ms.
_SWITCH_INTERVAL_S = 0.0005


def serve(
    model_path: str,
    *,
    host: str = "127.0.0.1",
    port: int = 30100,
    context_length: int | None = None,
    max_running_requests: int | None = None,
    threads: int | None = None,
    weight_version: str = "default",
    dtype: str = "float32",
) -> None:
    """Serve until SIGINT or SIGTERM; raises PartUnavailable where it can't, RuntimeError if the worker dies.

    `dtype` float16: the weights of a step of few tokens (`RowModel`).
    """
    # transformers and OpenMP start with as many threads as there are cores; until the size is known, one will do.
    torch.set_num_threads(threads or 1)
    model = RowModel(model_path, in_halves=dtype == "float16")
    if context_length is not None:
        model.context_length_tokens = min(context_length, model.context_length_tokens)
    is_small = model.num_parameters < SMALL_PARAMETERS
    if threads is None:
        threads = 1 if is_small else os.cpu_count() or 1
    num_rows = max_running_requests or (_AT_ONCE if is_small else _LARGE_AT_ONCE)
    listener = listening(host, port)
    decode = decoder(model_path)
    core = Core(model, num_rows=num_rows, version=weight_version, decode=decode)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvicorn.Config(build_app, loop="auto").get_loop_factory()) as runner:
        runner.run(_serve(model, core, listener, model_path, num_rows, threads, decode is not None))


async def _serve(
    model: RowModel,
    core: Core,
    listener: socket.socket,
    model_path: str,
    num_rows: int,
    threads: int,
    tokenizer: bool,
) -> None:
    loop = asyncio.get_running_loop()

    def end() -> None:
        backend.abort(None)
        server.should_exit = True

    worker = EngineWorker(core, loop, num_threads=threads, on_end=end)
    backend = CpuBackend(model, worker, core, model_path=model_path, num_rows=num_rows, tokenizer=tokenizer)
    server = AppServer(build_app(backend))
    for stop in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(stop, end)
    worker.start()
    host, port = listener.getsockname()[:2]
    log.info("engine ready url=http://%s:%d model=%s threads=%d", host, port, model_path, threads)
    await server.serve(sockets=[listener])
    if not worker.alive:
        raise RuntimeError("the engine's worker thread died; its traceback is above")
    worker.stop()


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raises PartUnavailable where the port can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named TCP, or asyncio leaves Nagle's algorithm on and a small chunk waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PartUnavailable(f"engine: can't listen on {host}:{port} ({error}); choose another --port") from error
    return listener


def decoder(model_path: str) -> Decode | None:
    """Return a function from token ids to text, special tokens included; None: the folder has no tokenizer."""
    file = Path(model_path) / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))

    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False))
