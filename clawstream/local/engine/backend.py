"""The CPU engine as a backend of the dialect: the event loop's side of the worker.

A weight update reads and checks the new folder before the worker hears of it, so the swap itself is a copy in memory.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping

import numpy as np

from clawstream import __version__
from clawstream.errors import UnusableCheckpoint
from clawstream.events import Shaping
from clawstream.inference.dialect import Call, RequestRefused, TokenDelta, check_fits, refuse_pictures
from clawstream.inference.service import CommandResult, Generation
from clawstream.local.engine.core import Core, EngineWorker
from clawstream.local.engine.model import RowModel
from clawstream.local.engine.rows import Grammar, Job
from clawstream.local.engine.sampling import grammars_of

log = logging.getLogger(__name__)


class _Running:
    """A request in the worker, and its sampled tokens that are not sent yet, merged into one delta."""

    def __init__(self, backend: "CpuBackend") -> None:
        self.job: Job  # whose sink this is
        self._backend = backend
        self._is_over = False
        self._unsent: TokenDelta | None = None
        self._arrival: asyncio.Future[None] | None = None

    def push(self, delta: TokenDelta) -> None:
        if self._unsent is None:
            self._unsent = delta
        else:
            self._unsent.absorb(delta)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def next(self) -> TokenDelta:
        while self._unsent is None:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        delta, self._unsent = self._unsent, None
        if delta.finish is not None:
            self._backend.forget(self.job)
            self._is_over = True
        return delta

    def cancel(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._backend.cancel(self.job)


class CpuBackend:
    """The model at `model_path`, served by `worker`."""

    def __init__(
        self, model: RowModel, worker: EngineWorker, core: Core, *, model_path: str, num_rows: int, tokenizer: bool
    ) -> None:
        self._model = model
        self._worker = worker
        self._adapters_of_core = core.adapters
        self._model_path = self._first_model_path = model_path  # versions have no tokenizer of their own
        self._version = core.version  # as the event loop knows it
        self._num_rows = num_rows
        self._tokenizer = tokenizer
        self._jobs: dict[str, Job] = {}
        self._adapters: dict[str, str] = {}
        self._job_over = asyncio.Event()
        self._updating = asyncio.Lock()

    async def start(self, call: Call) -> Generation:
        self._check(call)
        sampling = call.request.sampling
        stop_ids = frozenset() if sampling.ignore_eos else self._model.eos_token_ids | set(sampling.stop_token_ids)
        grammar = None
        if sampling.shaping is not None and sampling.shaping.has_grammar:
            grammar = await self._grammar(sampling.shaping, stop_ids)
            self._check(call)  # a second request of its name may have come meanwhile
        tokens = list(call.request.input_ids)
        running = _Running(self)
        job = running.job = Job(
            call=call,
            sink=running,
            seed=secrets.randbits(63) if sampling.sampling_seed is None else sampling.sampling_seed,
            stop_ids=stop_ids,
            tokens=tokens,
            num_prompt=len(tokens),
            prompt=np.array(tokens, dtype=np.int32),
            grammar=grammar,
        )
        self._jobs[call.rid] = job

        def submit(core: Core) -> tuple[()]:
            core.submit(job)
            return ()

        self._worker.post(submit)
        return running

    def _check(self, call: Call) -> None:
        refuse_pictures(call)
        check_fits(call, context_length_tokens=self._model.context_length_tokens, vocab_size=self._model.vocab_size)
        if call.rid in self._jobs:
            raise RequestRefused(f"rid {call.rid} names a request that still runs; send another rid")
        if call.request.sampling.stop and not self._tokenizer:
            raise RequestRefused(f"stop strings need a tokenizer and {self._model_path} has none; send stop_token_ids")
        name = call.request.lora_name
        if name is not None and name not in self._adapters:
            raise RequestRefused(f"lora_path {name!r} is not loaded; loaded adapters: {sorted(self._adapters)}")

    async def _grammar(self, shaping: Shaping, stop_ids: frozenset[int]) -> Grammar:
        if not (self._tokenizer and self._model.eos_token_ids and stop_ids) or shaping.min_new_tokens:
            raise RequestRefused(
                "an answer that follows a grammar needs a tokenizer and a token that ends it where the grammar ends: "
                "leave ignore_eos and min_new_tokens out"
            )

        def made() -> Grammar:
            return grammars_of(self._first_model_path, min(self._model.eos_token_ids)).matcher(shaping, stop_ids)

        return await asyncio.to_thread(made)  # thirty tools take half a second

    def forget(self, job: Job) -> None:
        """Free the request's id; a later job that has the same id keeps it."""
        if self._jobs.get(job.call.rid) is job:
            del self._jobs[job.call.rid]
            self._job_over.set()

    def cancel(self, job: Job) -> None:
        """End the job; its row is free before the next step."""
        self.forget(job)
        self._post_abort(job, "The client went away.")

    def abort(self, rid: str | None) -> None:
        # SGLang takes a rid as a prefix: a batch is aborted by the id it was sent under.
        for job in [job for key, job in self._jobs.items() if rid is None or key.startswith(rid)]:
            self._post_abort(job, "Aborted")

    def _post_abort(self, job: Job, message: str) -> None:
        self._worker.post(lambda core: core.abort(job, message))

    async def pause(self, mode: str) -> None:
        if mode == "abort":
            self.abort(None)
        await self._worker.set_paused(True, retract=mode == "retract")
        log.info("paused mode=%s requests=%d", mode, len(self._jobs))

    async def resume(self) -> None:
        await self._worker.set_paused(False)
        log.info("resumed requests=%d", len(self._jobs))

    async def update_weights(self, path: str, version: str | None, *, abort_all: bool) -> CommandResult:
        async with self._updating:
            if abort_all:
                self.abort(None)
            try:
                weights = await asyncio.to_thread(self._model.read_weights, path)
            except UnusableCheckpoint as error:
                log.warning("weights refused version=%s reason=%s", version, error)
                return CommandResult(success=False, message=str(error))
            await self._worker.call(lambda core: core.swap_weights(weights, version))
            self._model_path = path
            self._version = self._version if version is None else version
        log.info("weights replaced version=%s path=%s requests=%d", self._version, path, len(self._jobs))
        return CommandResult(
            success=True, message=f"Succeeded to update model weights. Weight version is {self._version}."
        )

    async def name_weights(self, version: str) -> CommandResult:
        async with self._updating:
            await self._worker.call(lambda core: setattr(core, "version", version))
            self._version = version
        return CommandResult(success=True, message=f"Weight version is {version}.")

    async def load_lora(self, name: str, path: str) -> CommandResult:
        async with self._updating:
            if name in self._adapters:
                return CommandResult(success=False, message=f"adapter {name} is loaded already; unload it first")
            try:
                pairs = await asyncio.to_thread(self._adapters_of_core.read, path)
            except UnusableCheckpoint as error:
                return CommandResult(success=False, message=str(error))
            await self._worker.call(lambda core: core.adapters.add(name, pairs))
            self._adapters[name] = path
        log.info("adapter loaded name=%s path=%s", name, path)
        return CommandResult(success=True, message="")

    async def unload_lora(self, name: str) -> CommandResult:
        async with self._updating:
            if name not in self._adapters:
                return CommandResult(
                    success=False, message=f"adapter {name} is not loaded; loaded: {sorted(self._adapters)}"
                )
            del self._adapters[name]
            # As SGLang does: nothing new may name it, and what runs under it ends first.
            while any(job.call.request.lora_name == name for job in self._jobs.values()):
                self._job_over.clear()
                await self._job_over.wait()

            def drop(core: Core) -> None:
                core.adapters.remove(name)
                core.forget_cache()

            await self._worker.call(drop)
        return CommandResult(success=True, message="")

    async def flush_cache(self) -> CommandResult:
        if self._jobs:
            return CommandResult(success=False, message=f"{len(self._jobs)} requests are running; nothing was flushed")
        await self._worker.call(Core.forget_cache)
        return CommandResult(success=True, message="Cache flushed.")

    def adapters(self) -> Mapping[str, str]:
        return self._adapters

    def alive(self) -> bool:
        return self._worker.alive

    def model_info(self) -> dict[str, object]:
        return {
            "model_path": self._model_path,
            "served_model_name": self._model_path,
            "tokenizer_path": self._model_path,
            "is_generation": True,
            "weight_version": self._version,
            "model_type": self._model.model_type,
            "architectures": self._model.architectures,
        }

    def server_info(self) -> dict[str, object]:
        return {
            "model_path": self._model_path,
            "context_length": self._model.context_length_tokens,
            "max_running_requests": self._num_rows,
            "incremental_streaming_output": True,
            "weight_version": self._version,
            "version": f"clawstream-cpu-{__version__}",
            "internal_states": [{"num_requests": len(self._jobs)}],
        }
