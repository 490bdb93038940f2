"""A deterministic engine for tests: the real dialect over HTTP, with answers from a function.

It computes nothing and simulates no model; what is real is the wire: streaming, pauses, versions, refusals and cuts.
"""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from clawstream.inference.dialect import Call, Logprob, RequestRefused, TokenDelta, check_fits
from clawstream.inference.engine import WeightsSpan
from clawstream.inference.service import (
    AppServer,
    Backend,
    CommandResult,
    ConnectionDropped,
    Generation,
    build_app,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedAnswer:
    """The script's answer to a prompt; without log-probs of its own it has those of `token_logprob`.

    After `stall_after_tokens` it sends nothing more, until its client leaves.
    """

    token_ids: Sequence[int]
    logprobs_nats: Sequence[float] | None = None
    stall_after_tokens: int | None = None


Script = Callable[[Sequence[int]], ScriptedAnswer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with one request: a refusal before it starts, or a cut connection after `num_tokens`."""

    status: int | None = None
    message: str = "scripted failure"
    cut_after_tokens: int | None = None


def token_logprob(position: int, token: int) -> float:
    """A fixed log-prob in nats for a token at a position of the sequence; scoring and answers agree on it."""
    return -((position * 31 + token * 17) % 97 + 1) / 32


def counting(num_tokens: int = 8, *, first: int = 10) -> Script:
    """A script that answers first, first + 1, ... whatever the prompt is."""
    return lambda _input_ids: ScriptedAnswer(token_ids=tuple(range(first, first + num_tokens)))


@dataclass(slots=True, kw_only=True)
class ScriptedBackend:
    """The state of a scripted engine; tests read `calls` and turn `hold`, `release` and `faults`."""

    script: Script
    vocab_size: int = 1024
    context_length_tokens: int = 2048
    eos_token_ids: frozenset[int] = frozenset()
    token_delay_s: float = 0.0
    decode: Callable[[Sequence[int]], str] | None = None
    on_update: Callable[[str, str | None], Script] | None = None
    model_path: str = "scripted"
    version: str = "default"
    calls: list[Call] = field(default_factory=list)
    faults: deque[Fault] = field(default_factory=deque)
    cancelled: list[str] = field(default_factory=list)
    healthy: bool = True
    quantization: str | None = None  # as SGLang names it
    picture_tokens: Callable[[str], int] = lambda _: 1  # of a picture, by its data: URL
    flowing: bool = True
    _running: "dict[str, _Speech]" = field(default_factory=dict)
    _adapters: dict[str, str] = field(default_factory=dict)
    _speech_over: asyncio.Event = field(default_factory=asyncio.Event)

    def hold(self) -> None:
        """No token is sampled until `release`."""
        self.flowing = False

    def release(self) -> None:
        """Tokens flow."""
        self.flowing = True
        for speech in self._running.values():
            speech.wake()

    @property
    def running(self) -> Mapping[str, "_Speech"]:
        """Requests under way, by their id."""
        return self._running

    async def start(self, call: Call) -> Generation:
        self.calls.append(call)
        fault = self.faults.popleft() if self.faults else Fault()
        if fault.status is not None:
            raise RequestRefused(fault.message, fault.status)
        check_fits(call, context_length_tokens=self.context_length_tokens, vocab_size=self.vocab_size)
        if call.rid in self._running:
            raise RequestRefused(f"rid {call.rid} names a request that still runs; send another rid")
        if call.request.lora_name is not None and call.request.lora_name not in self._adapters:
            raise RequestRefused(f"lora_path {call.request.lora_name!r} is not loaded")
        if call.request.sampling.stop and self.decode is None:
            raise RequestRefused("stop strings need a tokenizer and this engine has none; send stop_token_ids")
        speech = _Speech(call, self, fault.cut_after_tokens)
        self._running[call.rid] = speech
        return speech

    def forget(self, rid: str, speech: "_Speech") -> None:
        """The speech is over; a later one under the same id goes on."""
        if self._running.get(rid) is speech:
            del self._running[rid]
            self._speech_over.set()

    def abort(self, rid: str | None) -> None:
        for speech in [one for key, one in self._running.items() if rid is None or key.startswith(rid)]:
            speech.abort("Aborted")

    async def pause(self, mode: str) -> None:
        if mode == "abort":
            self.abort(None)
        self.hold()

    async def resume(self) -> None:
        self.release()

    async def update_weights(self, path: str, version: str | None, *, abort_all: bool) -> CommandResult:
        if not _is_model(path):
            return CommandResult(success=False, message=f"{path} has no config.json; the weights in use stay")
        if abort_all:
            self.abort(None)
        if self.on_update is not None:
            self.script = self.on_update(path, version)
        self.model_path, self.version = path, self.version if version is None else version
        return CommandResult(
            success=True, message=f"Succeeded to update model weights. Weight version is {self.version}."
        )

    async def name_weights(self, version: str) -> CommandResult:
        self.version = version
        return CommandResult(success=True, message=f"Weight version is {version}.")

    async def load_lora(self, name: str, path: str) -> CommandResult:
        if name in self._adapters:
            return CommandResult(success=False, message=f"adapter {name} is loaded already; unload it first")
        self._adapters[name] = path
        return CommandResult(success=True, message="")

    async def unload_lora(self, name: str) -> CommandResult:
        if self._adapters.pop(name, None) is None:
            return CommandResult(success=False, message=f"adapter {name} is not loaded")
        while any(speech.lora_name == name for speech in self._running.values()):
            self._speech_over.clear()
            await self._speech_over.wait()
        return CommandResult(success=True, message="")

    async def flush_cache(self) -> CommandResult:
        return CommandResult(success=not self._running, message=f"{len(self._running)} requests are running")

    def adapters(self) -> Mapping[str, str]:
        return self._adapters

    def alive(self) -> bool:
        return self.healthy

    def model_info(self) -> dict[str, object]:
        return {"model_path": self.model_path, "is_generation": True, "weight_version": self.version}

    def server_info(self) -> dict[str, object]:
        said = {"model_path": self.model_path, "context_length": self.context_length_tokens, "version": "scripted"}
        return said | {"quantization": self.quantization}


def _is_model(path: str) -> bool:
    return (Path(path) / "config.json").is_file()


class _Speech:
    """One answer being given: each `next` is one token."""

    def __init__(self, call: Call, backend: ScriptedBackend, cut_after_tokens: int | None) -> None:
        self._call = call
        self._backend = backend
        self._cut_after_tokens = cut_after_tokens
        self._spans: list[WeightsSpan] = []
        self._said: list[int] = []
        self._aborted: str | None = None
        self._woken = asyncio.Event()
        self._over = False
        pictures = map(backend.picture_tokens, call.request.pictures)
        self._num_expanded = sum(number - 1 for number in pictures)  # the prompt has one token for each picture
        answer = backend.script(call.request.input_ids)
        self._stall_after_tokens = answer.stall_after_tokens
        self._rest: Iterator[tuple[int, float]] = iter(self._timed(answer))

    def _timed(self, answer: ScriptedAnswer) -> list[tuple[int, float]]:
        first = len(self._call.request.input_ids)
        given = answer.logprobs_nats or [token_logprob(first + i, token) for i, token in enumerate(answer.token_ids)]
        return list(zip(answer.token_ids, given, strict=True))

    @property
    def lora_name(self) -> str | None:
        """The adapter that the request names."""
        return self._call.request.lora_name

    async def next(self) -> TokenDelta:
        sampling = self._call.request.sampling
        if sampling.max_new_tokens == 0:
            return self._delta(None, {"type": "length", "length": 0})
        await self._turn()
        if self._aborted is not None:
            return self._delta(None, {"type": "abort", "message": self._aborted})
        if self._is_past(self._cut_after_tokens):
            self._backend.forget(self._call.rid, self)
            raise ConnectionDropped
        pair = next(self._rest, None)
        if pair is None:
            # A script without further tokens ends like a model that samples its stop token.
            return self._delta(None, {"type": "stop", "matched": None})
        self._said.append(pair[0])
        return self._delta(pair, self._finish(pair[0]))

    async def _turn(self) -> None:
        """It is time for the next token, or the request was aborted."""
        await asyncio.sleep(self._backend.token_delay_s)
        while self._aborted is None and (not self._backend.flowing or self._is_past(self._stall_after_tokens)):
            self._woken.clear()
            await self._woken.wait()

    def _is_past(self, num_tokens: int | None) -> bool:
        return num_tokens is not None and len(self._said) >= num_tokens

    def wake(self) -> None:
        """The speech looks again whether it may go on."""
        self._woken.set()

    def _finish(self, token: int) -> dict[str, object] | None:
        sampling = self._call.request.sampling
        if sampling.stop and self._backend.decode is not None:
            text = self._backend.decode(self._said)
            for stop in sampling.stop:
                if stop in text:
                    return {"type": "stop", "matched": stop}
        stops = frozenset() if sampling.ignore_eos else self._backend.eos_token_ids | set(sampling.stop_token_ids)
        if token in stops:
            return {"type": "stop", "matched": token}
        if len(self._said) >= sampling.max_new_tokens:
            return {"type": "length", "length": sampling.max_new_tokens}
        return None

    def _delta(self, pair: tuple[int, float] | None, finish: dict[str, object] | None) -> TokenDelta:
        version = self._backend.version
        if pair is not None:
            if self._spans and self._spans[-1].version == version:
                self._spans[-1] = WeightsSpan(version, self._spans[-1].num_tokens + 1)
            else:
                self._spans.append(WeightsSpan(version, 1))
        if finish is not None:
            self._over = True
            self._backend.forget(self._call.rid, self)
        return TokenDelta(
            token_ids=[] if pair is None else [pair[0]],
            logprobs=[] if pair is None else [pair[1]],
            prompt_tokens=len(self._call.request.input_ids) + self._num_expanded,
            completion_tokens=len(self._said),
            cached_tokens=0,
            weight_version=self._spans[-1].version if self._spans else version,
            input_logprobs=self._scores(),
            top_logprobs=[[(pair[1], pair[0], None)]] if pair is not None and self._call.top_logprobs_num else None,
            finish=finish,
            weight_versions=self._spans if finish is not None else (),
        )

    def _scores(self) -> list[Logprob]:
        start, ids = self._call.logprob_start, self._call.request.input_ids
        if start is None:
            return []
        return [
            (None if position == start else token_logprob(position, ids[position]), ids[position], None)
            for position in range(start, len(ids))
        ]

    def abort(self, message: str) -> None:
        """The next delta is the last one."""
        self._aborted = message
        self.wake()

    def cancel(self) -> None:
        if not self._over:
            self._over = True
            self._backend.cancelled.append(self._call.rid)
            self._backend.forget(self._call.rid, self)
            self.abort("The client went away.")


@asynccontextmanager
async def serving(backend: Backend, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """The backend behind a real port on this event loop; yields its URL."""
    # TCP is named, else asyncio leaves Nagle's algorithm on and a small chunk waits 40 ms for an acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    server = AppServer(build_app(backend))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://{host}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            backend.abort(None)
            await running
