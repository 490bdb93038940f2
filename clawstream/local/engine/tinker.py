"""An engine whose answers a Tinker service samples: SGLang's dialect here, the service's own API there.

It holds no weights. The base's version is 0; each later version is an adapter, of which the service has a snapshot, and
"loading" it means to remember the snapshot's name. So a request under an adapter's name is answered by that version
alone. Answers come back whole. The service tells log-probs at temperature 1, so only answers at 1 have any.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clawstream import __version__
from clawstream.errors import ClawstreamError, ServiceAway, ServiceRefused, UnusableCheckpoint
from clawstream.inference.dialect import Call, RequestRefused, TokenDelta, check_fits, refuse_pictures
from clawstream.inference.engine import WeightsSpan
from clawstream.inference.model_folder import text_config
from clawstream.inference.service import CommandResult, ConnectionDropped
from clawstream.inference.tinker_service import TinkerService, last_logprobs, model_input, snapshot_in
from clawstream.local.engine.model import eos_ids
from clawstream.local.engine.rows import Decode

log = logging.getLogger(__name__)

BASE = "0"
ASKED_EVERY_S = 10.0  # whether the service is there, while requests wait for it
_ABORTED = {"type": "abort", "message": "Aborted"}


class Snapshots:
    """The adapters that are loaded, and a client of the service's SDK for each."""

    def __init__(self, service: TinkerService) -> None:
        self.service = service
        self.paths: dict[str, str] = {}  # by name
        self._clients: dict[str | None, Any] = {}

    async def client(self, name: str | None) -> Any:
        """Return the client that samples by the adapter; None: by the base."""
        if name not in self._clients:
            snapshot = None if name is None else snapshot_in(Path(self.paths[name]))
            self._clients[name] = await asyncio.to_thread(self.service.sampler, snapshot)
        return self._clients[name]

    async def load(self, name: str, path: str) -> None:
        """Load the adapter; raises ValueError where the folder names no snapshot, ServiceAway."""
        snapshot = snapshot_in(Path(path))
        self._clients[name] = await asyncio.to_thread(self.service.sampler, snapshot)
        self.paths[name] = path

    def ask_afresh(self, name: str | None) -> None:
        """Have the next request make a new client of it: a service that was away may not know the old one's session."""
        self._clients.pop(name, None)

    def unload(self, name: str) -> None:
        """Forget the adapter; requests that run under it end as they would have."""
        del self.paths[name]
        self._clients.pop(name, None)


class TinkerBackend:
    """The base in `folder` and its adapters, as the service samples them."""

    def __init__(self, service: TinkerService, folder: Path, *, ends: Sequence[int], decode: Decode | None) -> None:
        config = text_config(folder) or {}
        self._snapshots = Snapshots(service)
        self._folder = folder
        self._context_tokens = int(config["max_position_embeddings"])
        self._num_token_ids = int(config["vocab_size"])
        self._family = str(config.get("model_type"))
        self._ends, self._decode = tuple(ends), decode
        self._running: dict[str, asyncio.Task[TokenDelta]] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._problem: str | None = None

    async def start(self, call: Call) -> "_WholeAnswer":
        refuse_pictures(call)
        check_fits(call, context_length_tokens=self._context_tokens, vocab_size=self._num_token_ids)
        sampling, name = call.request.sampling, call.request.lora_name
        if sampling.shaping is not None or call.top_logprobs_num:
            raise RequestRefused(
                "penalties, biases, min_p, grammars and top_logprobs are not a Tinker service's: leave them out"
            )
        if sampling.stop and self._decode is None:
            raise RequestRefused(f"stop strings need a tokenizer and {self._folder} has none; send stop_token_ids")
        if name is not None and name not in self._snapshots.paths:
            raise RequestRefused(f"lora_path {name!r} is not loaded; loaded adapters: {sorted(self._snapshots.paths)}")
        if call.rid in self._running:
            raise RequestRefused(f"rid {call.rid} names a request that still runs; send another rid")
        task = self._running[call.rid] = asyncio.create_task(self._answered(call))
        task.add_done_callback(lambda done: self._over(call.rid, done))
        return _WholeAnswer(self, task, call)

    def _over(self, rid: str, task: "asyncio.Task[TokenDelta]") -> None:
        del self._running[rid]
        if not task.cancelled():
            task.exception()  # a client that went away never asks for it

    async def _answered(self, call: Call) -> TokenDelta:
        name = call.request.lora_name
        try:
            client = await self._snapshots.client(name)
            await self._resumed.wait()
            found = await self._scored(client, call) if call.logprob_start is not None else ()
            answer = _empty(call, found)
            if call.request.sampling.max_new_tokens:
                await self._sample(client, call, answer)
        except ServiceRefused as error:
            raise RequestRefused(str(error)) from error
        except ClawstreamError as error:
            self._snapshots.ask_afresh(name)
            if isinstance(error, UnusableCheckpoint):
                log.error("adapter=%s state=gone reason=%s", name, error)
            else:
                self._away(error)
            raise ConnectionDropped(str(error)) from error
        self._problem = None
        return answer

    async def _scored(self, client: Any, call: Call) -> list[tuple[float | None, int, None]]:
        """Return the log-probs of the prompt's tokens from `logprob_start` on; the first has none."""
        service, ids, start = self._snapshots.service, call.request.input_ids, call.logprob_start or 0
        wanted = list(ids[start + 1 :])
        values: list[float] = []
        if wanted:
            told = await service.awaited(lambda: service.scored(client, ids, len(wanted)), "a prompt's log-probs")
            values = last_logprobs(told, len(ids), len(wanted), url=service.url)
        first = [(None, token, None) for token in ids[start : start + 1]]
        return [*first, *((value, token, None) for value, token in zip(values, wanted, strict=True))]

    async def _sample(self, client: Any, call: Call, answer: TokenDelta) -> None:
        from tinker import types

        service, sampling = self._snapshots.service, call.request.sampling
        ends = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._ends)]
        params = types.SamplingParams(
            max_tokens=sampling.max_new_tokens, temperature=sampling.temperature, top_p=sampling.top_p,
            top_k=-1 if sampling.top_k is None else sampling.top_k, seed=sampling.sampling_seed,
            stop=list(dict.fromkeys(ends)) or None,
        )  # fmt: skip
        prompt = model_input(call.request.input_ids)
        told = await service.awaited(
            lambda: client.sample(prompt=prompt, num_samples=1, sampling_params=params), "an answer"
        )
        told = told.sequences[0]
        tokens, values = list(told.tokens), list(told.logprobs or ())
        if len(values) != len(tokens) or len(tokens) > sampling.max_new_tokens:
            raise ServiceAway(
                f"Tinker service {service.url}: {len(values)} log-probs for {len(tokens)} tokens, of at most "
                f"{sampling.max_new_tokens}; the answer is not used"
            )
        num, answer.finish = await asyncio.to_thread(self._end, call, tokens, ends)
        # The service tells them at temperature 1; of another distribution there are none.
        known = sampling.temperature in (0.0, 1.0) and sampling.top_p == 1.0 and sampling.top_k is None
        answer.token_ids = tokens[:num]
        answer.logprobs = [float(value) if known else None for value in values[:num]]
        answer.completion_tokens = num
        answer.weight_versions = (WeightsSpan(BASE, num),)

    def _end(self, call: Call, tokens: Sequence[int], ends: Sequence[int]) -> tuple[int, dict[str, object]]:
        """Return how many of the tokens are the answer's, and why it ends there."""
        stops = call.request.sampling.stop
        # Nearly every token adds at least one byte; 8 more allow for special tokens without text.
        num_tail = max((len(stop.encode()) for stop in stops), default=0) + 8
        for place, token in enumerate(tokens, 1):
            text = self._decode(tokens[max(0, place - num_tail) : place]) if stops and self._decode is not None else ""
            if (found := next((stop for stop in stops if stop in text), None)) is not None:
                return place, {"type": "stop", "matched": found}
            if token in ends:
                return place, {"type": "stop", "matched": token}
        return len(tokens), {"type": "length", "length": call.request.sampling.max_new_tokens}

    async def look(self) -> None:
        """Ask whether the service is there, while requests wait for it or it was away; if it is not, drop them."""
        if not self._running and self._problem is None:
            return
        try:
            await self._snapshots.service.present()
        except ClawstreamError as error:
            self._away(error)
            self.abort(None)
            return
        self._problem = None

    def _away(self, error: ClawstreamError) -> None:
        if self._problem is None:
            log.warning("service=%s state=away reason=%s", self._snapshots.service.url, error)
        self._problem = str(error)

    def abort(self, rid: str | None) -> None:
        for task in [task for key, task in self._running.items() if rid is None or key.startswith(rid)]:
            task.cancel()

    async def pause(self, mode: str) -> None:
        if mode == "abort":
            self.abort(None)
        self._resumed.clear()

    async def resume(self) -> None:
        self._resumed.set()

    async def update_weights(self, path: str, version: str | None, *, abort_all: bool) -> CommandResult:
        if abort_all:
            self.abort(None)
        if version == BASE and Path(path) == self._folder:  # as it has been since the start
            return CommandResult(success=True, message=f"Weight version is {BASE}.")
        return CommandResult(
            success=False, message=f"{path}: a Tinker service trains adapters; whole weights can't be taken over"
        )

    async def name_weights(self, version: str) -> CommandResult:
        return CommandResult(success=version == BASE, message=f"Weight version is {BASE}.")

    async def load_lora(self, name: str, path: str) -> CommandResult:
        if name in self._snapshots.paths:
            return CommandResult(success=False, message=f"adapter {name} is loaded already; unload it first")
        try:
            await self._snapshots.load(name, path)
        except (ValueError, UnusableCheckpoint) as error:
            return CommandResult(success=False, message=str(error))
        except ClawstreamError as error:  # that says nothing of the version, which is to be offered again
            raise RequestRefused(str(error), 503) from error
        log.info("adapter loaded name=%s path=%s", name, path)
        return CommandResult(success=True, message="")

    async def unload_lora(self, name: str) -> CommandResult:
        if name not in self._snapshots.paths:
            loaded = sorted(self._snapshots.paths)
            return CommandResult(success=False, message=f"adapter {name} is not loaded; loaded: {loaded}")
        self._snapshots.unload(name)
        return CommandResult(success=True, message="")

    async def flush_cache(self) -> CommandResult:
        return CommandResult(success=True, message="The service keeps caches by snapshot.")

    def adapters(self) -> Mapping[str, str]:
        return self._snapshots.paths

    def alive(self) -> bool:
        return self._problem is None

    def model_info(self) -> dict[str, object]:
        path = str(self._folder)
        return {
            "model_path": path, "served_model_name": path, "tokenizer_path": path, "is_generation": True,
            "weight_version": BASE, "model_type": self._family,
        }  # fmt: skip

    def server_info(self) -> dict[str, object]:
        return {
            "model_path": str(self._folder), "context_length": self._context_tokens, "weight_version": BASE,
            "incremental_streaming_output": True, "version": f"clawstream-tinker-{__version__}",
            "internal_states": [{"num_requests": len(self._running)}],
        }  # fmt: skip


class _WholeAnswer:
    """A request whose answer comes as one delta."""

    def __init__(self, backend: TinkerBackend, task: "asyncio.Task[TokenDelta]", call: Call) -> None:
        self._backend = backend
        self._task = task
        self._call = call

    async def next(self) -> TokenDelta:
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if not self._task.cancelled():
                raise
            if not self._backend.alive():
                raise ConnectionDropped("the service is away") from None
            aborted = _empty(self._call, ())
            aborted.finish = dict(_ABORTED)
            return aborted

    def cancel(self) -> None:
        self._task.cancel()


def _empty(call: Call, input_logprobs: Sequence[tuple[float | None, int, None]]) -> TokenDelta:
    return TokenDelta(
        token_ids=[], logprobs=[], prompt_tokens=len(call.request.input_ids), completion_tokens=0, cached_tokens=0,
        weight_version=BASE, input_logprobs=input_logprobs, finish={"type": "length", "length": 0},
    )  # fmt: skip


async def serve(service: TinkerService, folder: Path, *, port: int, stop: asyncio.Event) -> None:
    """Serve at the port until `stop`. Raises PartUnavailable where it can't be had."""
    from clawstream.inference.service import AppServer, build_app
    from clawstream.local.engine.server import decoder, listening

    backend = TinkerBackend(service, folder, ends=ends_in(folder), decode=decoder(str(folder)))
    server = AppServer(build_app(backend))
    watching = asyncio.create_task(_watch(backend))

    async def end() -> None:
        await stop.wait()
        backend.abort(None)
        server.should_exit = True

    ending = asyncio.create_task(end())
    try:
        await server.serve(sockets=[listening("127.0.0.1", port)])
    finally:
        for task in (watching, ending):
            task.cancel()


async def _watch(backend: TinkerBackend) -> None:
    while True:
        await asyncio.sleep(ASKED_EVERY_S)
        await backend.look()


def ends_in(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end an answer, as the folder's files name them."""
    return tuple(sorted(eos_ids(str(folder), (text_config(folder) or {}).get("eos_token_id"))))
