"""Requests to a model and its answers as values, the protocol of engine clients, and whether an answer is possible.

An engine gives no number that it did not compute: a log-prob it left out is None, never 0.
Log-probs are nats at the sampling temperature, after penalties and before top-p, top-k and min-p (temperature 0 counts
as 1), as SGLang reports them by default; with SGLANG_RETURN_ORIGINAL_LOGPROB set it reports those of temperature 1
instead, so leave that unset.

A value that no engine can have computed is not passed on, so it is neither shown nor recorded.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NoReturn, Protocol

from clawstream.errors import ClawstreamError
from clawstream.events import Sampling as Recorded
from clawstream.events import Shaping, TokenIds


class EngineRefused(ClawstreamError):
    """The engine understood the request and will not do it; asking again the same way changes nothing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class FinishKind(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of an answer; `matched` is the stop token id or stop string that ended it."""

    kind: FinishKind
    matched: int | str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; temperature 0 is greedy, and an absent seed lets the engine choose one."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    sampling_seed: int | None = None
    ignore_eos: bool = False
    shaping: Shaping | None = None


def as_recorded(recorded: Recorded, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return the parameters of a recorded `Sampling`, all of it; `stop_token_ids` are the model's own."""
    return SamplingParams(
        max_new_tokens=recorded.max_tokens,
        temperature=recorded.temperature,
        top_p=recorded.top_p,
        top_k=recorded.top_k,
        stop_token_ids=stop_token_ids,
        stop=recorded.stop,
        sampling_seed=recorded.seed,
        shaping=recorded.shaping,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt as token ids; requests share cached prefixes only under the same `extra_key` and adapter."""

    input_ids: Sequence[int]
    sampling: SamplingParams
    extra_key: str | None = None
    rid: str | None = None
    lora_name: str | None = None
    top_logprobs_num: int = 0  # likeliest tokens at each place of the answer


class WeightsSpan(NamedTuple):
    """`num_tokens` tokens in a row, sampled by the weights named `version`."""

    version: str
    num_tokens: int


class Chunk(NamedTuple):
    """What is new since the chunk before; `finish` and `weight_versions` come with the last one.

    A tuple, because one is made for every few tokens. `num_sampled` counts the answer's tokens so far. `weight_version`
    is what the engine served when it sent the chunk: those weights sampled its tokens, or older ones.
    """

    token_ids: tuple[int, ...]
    logprobs_nats: tuple[float | None, ...]
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: str | None = None
    finish: Finish | None = None
    weight_versions: tuple[WeightsSpan, ...] = ()
    num_sampled: int | None = None
    top_logprobs: tuple[tuple[tuple[float, int], ...], ...] = ()  # of each token, where they were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What an engine serves now; `weight_version` is None where the engine names none."""

    model_path: str
    context_length_tokens: int
    weight_version: str | None


class Scores(NamedTuple):
    """Log-probs (nats) of an answer's tokens: the teacher's, who sees the hint, and the policy's, who does not."""

    teacher_logprobs: tuple[float, ...]
    student_logprobs: tuple[float, ...]
    student_version: int


class ScoreRequest(NamedTuple):
    """An answer, and the prompts that it is scored after."""

    hinted_ids: TokenIds
    prompt_ids: TokenIds
    response_ids: TokenIds
    policy_id: str
    sampled_by: int  # the newest version of that policy that sampled a token of it


class Engine(Protocol):
    """A model behind SGLang's dialect. Refusals are EngineRefused, everything that may pass is TryLater."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks as they are sampled; closing the iterator early cancels the generation."""

    async def score(
        self, input_ids: Sequence[int], start: int, *, extra_key: str | None = None, lora_name: str | None = None
    ) -> tuple[float, ...]:
        """Log-probs (temperature 1) of input_ids[start:], each given all tokens before it; start is at least 1."""

    async def pause(self, *, retract: bool = False) -> None:
        """Sample no token until `resume`; running requests keep their state, or with `retract` compute it again."""

    async def update_weights(self, path: str, version: str, *, flush_cache: bool = False) -> None:
        """Serve the weights at `path` under the name `version`; no running request is cut.

        With `flush_cache`, which needs a pause with `retract`, no key uses what was cached before.
        """

    async def resume(self) -> None:
        """Go on sampling where `pause` stopped."""

    async def load_lora_adapter(self, name: str, path: str) -> None:
        """Load the adapter, which requests may name from now on."""

    async def unload_lora_adapter(self, name: str) -> None:
        """Unload the adapter, after the requests that run under it have finished."""

    async def lora_adapters(self) -> tuple[str, ...]:
        """The names of the adapters that are loaded."""

    async def health(self) -> bool:
        """Whether the engine answers and can generate."""

    async def server_info(self) -> ServerInfo:
        """What the engine serves at this moment."""


MOST_TOKEN_IDS = 2**31  # what the log can hold
MOST_NAME_CHARACTERS = 200
_ROUNDING_NATS = 1e-3  # how far above 0 rounding may put the log-prob of a certain token
_LEAST_NATS = -3.4e38  # what the log can hold


class Plausible:
    """One streamed answer to `request` by a model of so many token ids."""

    def __init__(self, request: GenerateRequest, num_token_ids: int) -> None:
        self._most_tokens = request.sampling.max_new_tokens
        self._prompt_tokens = len(request.input_ids)
        self._stop = request.sampling.stop
        self._num_token_ids = num_token_ids
        self.num_tokens = 0

    def take(self, chunk: Chunk) -> None:
        """Take the next chunk; raises ValueError where it is impossible."""
        limit = self._num_token_ids
        for token in chunk.token_ids:
            if type(token) is not int or not 0 <= token < limit:
                _wrong("token id", token, f"an integer from 0 to {limit - 1}")
        for value in chunk.logprobs_nats:
            # The usual case is spelled out, since this runs for every token.
            if value is not None and not (type(value) is float and _LEAST_NATS <= value <= 0.0):
                check_logprob(value)
        self.num_tokens += len(chunk.token_ids)
        if self.num_tokens > self._most_tokens:
            raise ValueError(f"{self.num_tokens} tokens, expected at most the {self._most_tokens} that were asked for")
        read_version(chunk.weight_version)
        _check_count("prompt_tokens", chunk.prompt_tokens, self._prompt_tokens)
        # A request that was retracted for others finds its own tokens cached when it goes on.
        _check_count("cached_tokens", chunk.cached_tokens, self._prompt_tokens + self._most_tokens)
        if chunk.finish is not None:
            self._check_end(chunk)

    def _check_end(self, chunk: Chunk) -> None:
        matched = chunk.finish and chunk.finish.matched
        if isinstance(matched, str) and matched not in self._stop:
            _wrong("matched stop", matched, "one of the stop strings that were asked for")
        if not (matched is None or isinstance(matched, str) or type(matched) is int):
            _wrong("matched stop", matched, "a token id or a string")


def check_logprob(value: object) -> None:
    """Raise ValueError where the value is no log-prob."""
    if type(value) is not float and type(value) is not int:
        _wrong("log-prob", value, "a number")
    if not _LEAST_NATS <= value <= _ROUNDING_NATS:
        _wrong("log-prob", value, "a number that is not above 0")


def _check_count(name: str, count: object, most: int) -> None:
    if count is not None and (type(count) is not int or not 0 <= count <= most):
        _wrong(name, count, f"an integer from 0 to {most}")


def read_version(name: object) -> str | None:
    """Return the name of an engine's weights; raises ValueError where it is no name."""
    if name is not None and (not isinstance(name, str) or len(name) > MOST_NAME_CHARACTERS):
        raise ValueError(
            f"weight_version is {repr(name)[:100]}, expected a text of at most {MOST_NAME_CHARACTERS} characters"
        )
    return name


def _wrong(name: str, found: object, expected: str) -> NoReturn:
    raise ValueError(f"{name} is {repr(found)[:100]}, expected {expected}")
