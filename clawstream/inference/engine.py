"""Requests to a model and its answers as values, the protocol of engine clients, and policy versions on engines. Pure.

A log-prob that an engine left out is None, never 0. Log-probs are nats at the sampling temperature, after penalties and
before top-p, top-k and min-p (temperature 0 counts as 1), as SGLang reports them while SGLANG_RETURN_ORIGINAL_LOGPROB
is unset. A value that no engine can have computed is neither shown nor recorded. An adapter's name ends with its policy
version, so the names of an engine's loaded adapters tell which versions it serves.
"""

import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple, NoReturn, Protocol

from clawstream.errors import ClawstreamError, TryLater
from clawstream.events import FinishReason, Shaping, TokenIds, VersionSpan, shared_policy
from clawstream.events import Sampling as Recorded


class EngineRefused(ClawstreamError):
    """The engine understood the request and refuses it; the same request would be refused again."""

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
    """Return all parameters of a recorded `Sampling`; `stop_token_ids` are the model's own."""
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
    top_logprobs_num: int = 0  # how many of the likeliest tokens to report at each place of the answer
    pictures: tuple[str, ...] = ()  # data: URLs, in the order of their tokens in the prompt
    picture_id: int | None = None  # the token that a picture is made of; None: there are none

    @property
    def unexpanded_ids(self) -> list[int]:
        """The prompt with one token for each picture, which SGLang makes as many as the picture takes (0.5.23)."""
        if not self.pictures:
            return list(self.input_ids)
        before = (None, *self.input_ids)
        return [new for old, new in zip(before, self.input_ids, strict=False) if new != self.picture_id or old != new]


class WeightsSpan(NamedTuple):
    """`num_tokens` tokens in a row, sampled by the weights named `version`."""

    version: str
    num_tokens: int


class Chunk(NamedTuple):
    """What is new since the chunk before; `finish` and `weight_versions` come with the last one.

    A tuple, because one is made for every few tokens. `num_sampled` counts the answer's tokens so far. `weight_version`
    is what the engine served when it sent the chunk: these weights, or older ones, sampled its tokens.
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
    """Log-probs (nats) of an answer's tokens: by the teacher with the hint, and by the student, the policy, without."""

    teacher_logprobs: tuple[float, ...]
    student_logprobs: tuple[float, ...]
    student_version: int


class ScoreRequest(NamedTuple):
    """An answer, and the prompts that it is scored after."""

    hinted_ids: TokenIds
    prompt_ids: TokenIds
    response_ids: TokenIds
    policy_id: str
    sampled_by: int  # the newest version of the policy that sampled a token of the answer


class Engine(Protocol):
    """A model behind a server's dialect. A refusal raises EngineRefused, any error that may pass raises TryLater."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks as they are sampled; closing the iterator early cancels the generation."""

    async def lora_adapters(self) -> tuple[str, ...]:
        """The names of the adapters that are loaded."""

    async def server_info(self) -> ServerInfo:
        """What the engine serves at this moment."""


MOST_TOKEN_IDS = 2**31  # what the log can hold
MOST_NAME_CHARACTERS = 200
_ROUNDING_NATS = 1e-3  # how far above 0 rounding may put the log-prob of a token with probability 1
_LEAST_NATS = -3.4e38  # what the log can hold


class Plausible:
    """Checks whether chunks can be the answer to `request` of a model with `num_token_ids` token ids."""

    def __init__(self, request: GenerateRequest, num_token_ids: int) -> None:
        self._request = request
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
        num_prompt, most = len(self._request.input_ids), self._request.sampling.max_new_tokens
        if self.num_tokens > most:
            raise ValueError(f"{self.num_tokens} tokens, expected at most the {most} that were asked for")
        read_version(chunk.weight_version)
        # The engine makes the tokens of pictures: it has to come to as many as are recorded.
        _check_count(
            "prompt_tokens", chunk.prompt_tokens, num_prompt, least=num_prompt if self._request.pictures else 0
        )
        # A request that was retracted to make room finds its own tokens cached when it goes on.
        _check_count("cached_tokens", chunk.cached_tokens, num_prompt + most)
        if chunk.finish is not None:
            self._check_end(chunk.finish.matched)

    def _check_end(self, matched: object) -> None:
        if isinstance(matched, str) and matched not in self._request.sampling.stop:
            _wrong("matched stop", matched, "one of the stop strings that were asked for")
        if not (matched is None or isinstance(matched, str) or type(matched) is int):
            _wrong("matched stop", matched, "a token id or a string")


def check_logprob(value: object) -> None:
    """Raise ValueError where the value is no log-prob."""
    if type(value) is not float and type(value) is not int:
        _wrong("log-prob", value, "a number")
    if not _LEAST_NATS <= value <= _ROUNDING_NATS:
        _wrong("log-prob", value, "a number that is not above 0")


def _check_count(name: str, count: object, most: int, *, least: int = 0) -> None:
    if count is not None and (type(count) is not int or not least <= count <= most):
        _wrong(name, count, f"an integer from {least} to {most}")


def read_version(name: object) -> str | None:
    """Return the name of an engine's weights; raises ValueError where it is no name."""
    if name is not None and (not isinstance(name, str) or len(name) > MOST_NAME_CHARACTERS):
        _wrong("weight_version", name, f"a text of at most {MOST_NAME_CHARACTERS} characters")
    return name


def _wrong(name: str, found: object, expected: str) -> NoReturn:
    raise ValueError(f"{name} is {repr(found)[:100]}, expected {expected}")


BASE_VERSION = 0
_BASE_NAMES = ("default", "base")  # what SGLang calls the weights that it was started with
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_ADAPTER = re.compile(r"(.+)-v([0-9]{1,18})", re.ASCII | re.DOTALL)


def policy_version(name: str | None) -> int:
    """Return the version that an engine's weights are named after; the weights that it was started with are version 0.

    Raises TryLater for a name that is no version of ours.
    """
    if name is None or name in _BASE_NAMES:
        return BASE_VERSION
    if not _NUMBER.fullmatch(name):
        raise TryLater(
            f"the engine's weights are named {name[:100]!r}; expected a version number. Start it without that name"
        )
    return int(name)


def adapter_name(policy_id: str, version: int) -> str:
    """Return the name under which engines serve this version of the policy."""
    return f"{policy_id}-v{version}"


def adapter_version(policy_id: str, name: str) -> int | None:
    """Return the version that the name stands for; None: it is no adapter of this policy."""
    found = adapter_of(name)
    return found[1] if found is not None and found[0] == policy_id else None


def adapter_of(name: str) -> tuple[str, int] | None:
    """Return the policy and the version that the name of an adapter stands for; None: it is no such name."""
    found = _ADAPTER.fullmatch(name)
    if found is None or name != adapter_name(found[1], int(found[2])):
        return None
    return found[1], int(found[2])


Adapters = Mapping[str, Mapping[int, str]]  # names of loaded adapters, by policy and version


def adapters_of(names: Iterable[str]) -> Adapters:
    """Return those of the names that stand for a version of a policy."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        read = adapter_of(name)
        if read is not None:
            found.setdefault(read[0], {})[read[1]] = name
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """Which version sampled which tokens, and each token's log-prob; None for a token that no version sampled."""

    versions: tuple[VersionSpan, ...]
    logprobs_nats: Sequence[float | None]


def behaviour(
    engine_spans: Sequence[WeightsSpan], logprobs_nats: Sequence[float | None], adapter_version: int | None = None
) -> Behaviour:
    """Return which versions sampled the tokens. `adapter_version` is of the adapter that sampled; None: none did.

    `engine_spans` name the full weights, even under an adapter. Where these change under an adapter, the later tokens
    are of no version: they get the number of the new weights, and no log-probs. Raises TryLater where the spans don't
    cover the tokens, or go back to an older number: even a rollback is published under a new one.
    """
    spans = [span for span in engine_spans if span.num_tokens]
    num_named = sum(span.num_tokens for span in spans)
    if num_named != len(logprobs_nats):
        raise TryLater(
            f"the engine named the weights of {num_named} of {len(logprobs_nats)} sampled tokens; the answer is not "
            "recorded. Use an engine that reports weight_versions"
        )
    versions = tuple(
        VersionSpan(policy_version=policy_version(span.version), num_tokens=span.num_tokens) for span in spans
    )
    older = next((two for two in pairwise(versions) if two[0].policy_version > two[1].policy_version), None)
    if older is not None:
        raise TryLater(
            f"the engine went from version {older[0].policy_version} back to {older[1].policy_version} within an "
            "answer; the answer is not recorded"
        )
    if adapter_version is None or not versions:
        return Behaviour(versions=versions, logprobs_nats=logprobs_nats)
    first, *rest = versions
    lost = [None] * sum(span.num_tokens for span in rest)
    return Behaviour(
        versions=(replace(first, policy_version=adapter_version), *rest),
        logprobs_nats=[*logprobs_nats[: first.num_tokens], *lost],
    )


def finish_reason(finish: Finish, tool_calls: Sequence[object]) -> FinishReason:
    """Return why an answer ended, in OpenAI's words. `finish` must not be an abort: OpenAI has no word for it."""
    if finish.kind is FinishKind.LENGTH:
        return FinishReason.LENGTH
    return FinishReason.TOOL_CALLS if tool_calls else FinishReason.STOP


class Served(NamedTuple):
    """The weights or adapter that answer a request for the newest version of a policy."""

    policy_id: str
    weights: int
    version: int
    adapter: str | None  # the adapter that has this version; None: the full weights have it

    def cache_key(self, tenant: str | None = None) -> str:
        """Return the key under which a tenant's requests to these weights share cached prompts.

        Engines keep the caches of adapters apart themselves. A key's policy names its adapter here too, so that no key
        gets another's cached prompts even if an engine fails to.
        """
        adapter = None if self.policy_id == shared_policy(self.policy_id) else self.adapter
        parts = (self.policy_id, adapter, str(self.weights), tenant)
        return ":".join(part for part in parts if part is not None)


def newest_of(policy_id: str, weights: int, adapters: Adapters) -> Served:
    """Return what answers a request for the policy on an engine that has these weights and adapters.

    A key's policy is answered by its own newest adapter, or else by what answers for the policy that all share; never
    by another key's.
    """
    shared_id = shared_policy(policy_id)
    own, shared = adapters.get(policy_id, {}), adapters.get(shared_id, {})
    if own and policy_id != shared_id:
        return Served(policy_id, weights, max(own), own[max(own)])
    newest = max(shared, default=weights)
    return Served(policy_id, weights, max(weights, newest), shared[newest] if newest > weights else None)


class VersionedEngine(Protocol):
    """An engine that says what it serves."""

    @property
    def url(self) -> str: ...
    async def weight_version(self) -> str | None: ...
    async def lora_adapters(self) -> tuple[str, ...]: ...


async def served(engine: VersionedEngine, policy_id: str) -> Served:
    """Return what answers for the policy at the engine now.

    Raises TryLater where the engine does not answer, or names no version of ours.
    """
    weights = policy_version(await engine.weight_version())
    return newest_of(policy_id, weights, adapters_of(await engine.lora_adapters()))
