"""Jobs (requests in the engine), and the rows of the key-value cache that they use.

Only the worker thread touches a job once it is submitted. The first rows belong to jobs, decoding jobs before others,
so that their rows are one slice of the cache. The other rows keep the keys and values of finished jobs. A job reuses
them only under the same cache key and the same weights (`epoch` counts changes of weights). A row's entry at position p
belongs to its p-th token. Axes: S rows, C capacity in tokens, H key-value heads, D head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from clawstream.inference.dialect import Call, Logprob, TokenDelta
from clawstream.inference.engine import WeightsSpan

Decode: TypeAlias = Callable[[Sequence[int]], str]
TokenArray: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int32]]"
FinishReason: TypeAlias = dict[str, object]
FIRST_CAPACITY_TOKENS = 1024
_SHORTEST_REUSE_TOKENS = 16
_NOTHING = np.empty(0, dtype=np.int32)


class Sink(Protocol):
    """The receiver of a job's deltas, on the event loop."""

    def push(self, delta: TokenDelta) -> None:
        """Pass the delta on to be sent."""


class Grammar(Protocol):
    """A grammar, in its state after the answer so far."""

    def mask(self, logits_V: Tensor, /) -> None:
        """Exclude every token that the grammar does not allow next."""

    def take(self, token: int, /) -> None:
        """Advance the grammar by a token of the answer."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One request; its row holds keys and values of the first `num_computed` of its `tokens` (prompt and answer)."""

    call: Call
    sink: Sink
    seed: int
    stop_ids: frozenset[int]
    tokens: list[int]
    num_prompt: int
    prompt: TokenArray
    grammar: Grammar | None = None
    epoch: int = 0
    num_computed: int = 0
    cached_tokens: int = 0
    spans: list[WeightsSpan] = field(default_factory=list)
    input_logprobs: list[Logprob] = field(default_factory=list)
    input_top: list[Sequence[Logprob] | None] = field(default_factory=list)
    input_sent: bool = False
    finished: bool = False

    @property
    def cache_key(self) -> tuple[str | None, str | None]:
        """Only jobs with the same key share rows."""
        return self.call.request.extra_key, self.call.request.lora_name

    @property
    def max_new_tokens(self) -> int:
        return self.call.request.sampling.max_new_tokens

    @property
    def num_answered(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def target(self) -> int:
        """The number of tokens to compute before the next draw; a job that only scores never needs its last token."""
        return len(self.tokens) if self.max_new_tokens else self.num_prompt - 1

    @property
    def decoding(self) -> bool:
        """Whether all tokens but the last are computed, so that one more is enough for the next draw."""
        return self.max_new_tokens > 0 and self.num_computed == len(self.tokens) - 1 > 0

    def scored_positions(self, past: int, count: int) -> range:
        """The positions in [past, past + count) whose logits give a requested log-prob of the prompt."""
        start = self.call.logprob_start
        if start is None or self.num_answered:
            return range(0)
        return range(max(past, start), min(past + count, self.num_prompt - 1))

    def add_token(self, token: int, version: str) -> None:
        self.tokens.append(token)
        if self.grammar is not None:
            self.grammar.take(token)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = WeightsSpan(version, self.spans[-1].num_tokens + 1)
        else:
            self.spans.append(WeightsSpan(version, 1))

    def restart(self) -> None:
        """Mark all tokens as not computed; the answer so far stays."""
        self.num_computed = 0
        if not self.num_answered:
            self.input_logprobs.clear()
            self.input_top.clear()

    def delta(self, version: str, finish: FinishReason | None) -> TokenDelta:
        """Return a delta with the job's present state and no tokens."""
        first, self.input_sent = not self.input_sent, True
        return TokenDelta(
            token_ids=[],
            logprobs=[],
            prompt_tokens=self.num_prompt,
            completion_tokens=self.num_answered,
            cached_tokens=self.cached_tokens,
            weight_version=self.spans[-1].version if self.spans else version,
            input_logprobs=self.input_logprobs if first else (),
            input_top_logprobs=self.input_top if first and self.call.top_logprobs_num else None,
            finish=finish,
            weight_versions=self.spans if finish is not None else (),
        )


def finish_reason(job: Job, decode: Decode | None) -> FinishReason | None:
    """Return why the job ends with its last token; a stop is reported before the length limit. None: it goes on."""
    sampling = job.call.request.sampling
    if sampling.stop and decode is not None:
        # Nearly every token adds at least one byte; 8 more allow for special tokens without text.
        num_tail = max(len(stop.encode()) for stop in sampling.stop) + 8
        tail = decode(job.tokens[max(job.num_prompt, len(job.tokens) - num_tail) :])
        for stop in sampling.stop:
            if stop in tail:
                return {"type": "stop", "matched": stop}
    if job.tokens[-1] in job.stop_ids:
        return {"type": "stop", "matched": job.tokens[-1]}
    if job.num_answered >= job.max_new_tokens:
        return {"type": "length", "length": job.max_new_tokens}
    return None


class LayerKv(NamedTuple):
    """Keys and values of one layer, each [S, C, H, D]."""

    key_SCHD: Tensor
    value_SCHD: Tensor


class KvRows:
    """The cache of all rows; a layer's tensors are made at their first use, when their shape is known.

    Capacity doubles when a row needs more, so that memory depends on the longest request seen, not on the limit.
    """

    def __init__(self, *, num_rows: int, context_length_tokens: int) -> None:
        self.num_rows = num_rows
        self._limit = context_length_tokens
        self.capacity_tokens = min(FIRST_CAPACITY_TOKENS, context_length_tokens)
        self._layers: dict[int, LayerKv] = {}

    def layer(self, index: int, key_1HND: Tensor, value_1HND: Tensor) -> LayerKv:
        """The layer's tensors, shaped and typed as the keys and values about to be written."""
        if index not in self._layers:
            self._layers[index] = LayerKv(self._empty(key_1HND), self._empty(value_1HND))
        return self._layers[index]

    def _empty(self, like_1HND: Tensor) -> Tensor:
        _, heads, _, width = like_1HND.shape
        # Zeros, because NaN in a masked entry would make the weighted sum NaN.
        return torch.zeros(self.num_rows, self.capacity_tokens, heads, width, dtype=like_1HND.dtype)

    @torch.inference_mode()
    def reserve(self, num_tokens: int, used_tokens: Sequence[int]) -> None:
        """Make room for `num_tokens` tokens in every row; row r keeps its first used_tokens[r] entries."""
        if num_tokens <= self.capacity_tokens:
            return
        capacity = self.capacity_tokens
        while capacity < num_tokens:
            capacity *= 2
        self.capacity_tokens = max(num_tokens, min(capacity, self._limit))
        for index, layer in self._layers.items():
            grown = []
            for old_SCHD in layer:
                rows, _, heads, width = old_SCHD.shape
                new_SCHD = torch.zeros(rows, self.capacity_tokens, heads, width, dtype=old_SCHD.dtype)
                for row, used in enumerate(used_tokens):
                    new_SCHD[row, :used] = old_SCHD[row, :used]
                grown.append(new_SCHD)
            self._layers[index] = LayerKv(*grown)

    @torch.inference_mode()
    def copy(self, source: int, target: int, num_tokens: int) -> None:
        for layer in self._layers.values():
            for tensor_SCHD in layer:
                tensor_SCHD[target, :num_tokens] = tensor_SCHD[source, :num_tokens]

    @torch.inference_mode()
    def swap(self, one: int, one_tokens: int, other: int, other_tokens: int) -> None:
        for layer in self._layers.values():
            for tensor_SCHD in layer:
                kept = tensor_SCHD[one, :one_tokens].clone()
                tensor_SCHD[one, :other_tokens] = tensor_SCHD[other, :other_tokens]
                tensor_SCHD[other, :one_tokens] = kept


@dataclass(slots=True, kw_only=True)
class _FreeRow:
    """A row without a job: what a finished job left in it."""

    tokens: TokenArray
    cache_key: tuple[str | None, str | None]
    epoch: int
    tick: int  # the smaller, the longer ago the job ended


class JobRows:
    """The jobs that have a row, in the order of their rows."""

    def __init__(self, kv: KvRows) -> None:
        self.kv = kv
        self.jobs: list[Job] = []
        self.epoch = 0
        self._free = [self._empty() for _ in range(kv.num_rows)]
        self._tick = 0

    @staticmethod
    def _empty() -> _FreeRow:
        return _FreeRow(tokens=_NOTHING, cache_key=(None, None), epoch=-1, tick=0)

    @property
    def full(self) -> bool:
        return len(self.jobs) == self.kv.num_rows

    def new_epoch(self) -> None:
        """Begin a new epoch: later jobs reuse nothing computed so far; running jobs keep their keys."""
        self.epoch += 1
        self._free = [self._empty() for _ in range(self.kv.num_rows)]

    def admit(self, job: Job) -> None:
        """Give the job the next row, filled with the longest prefix that another row has."""
        row = len(self.jobs)
        source, num_shared = self._longest_prefix(job)
        if source is None:
            self._make_room(row)
        elif source >= row and num_shared * 2 >= self._used(source):
            self._swap(self._free, source, row)
        else:
            self._make_room(row, spare=source)
            self._reserve(num_shared)
            self.kv.copy(source, row, num_shared)
        self._free[row] = self._empty()
        job.epoch = self.epoch
        job.num_computed = num_shared
        job.cached_tokens = max(job.cached_tokens, num_shared)
        self.jobs.append(job)

    def reserve(self) -> None:
        """Make room in every job's row for all tokens that the job holds now."""
        self._reserve(max((len(job.tokens) for job in self.jobs), default=0))

    def release(self, job: Job) -> None:
        """Take the job's row away; keys of the present weights stay there for reuse."""
        row, last = self.jobs.index(job), len(self.jobs) - 1
        left = self._free_row_of(job)
        self._swap(self.jobs, row, last)
        self.jobs.pop()
        self._free[last] = left

    def arrange(self) -> int:
        """Move the decoding rows to the front; return their number."""
        first, last = 0, len(self.jobs) - 1
        while True:
            while first <= last and self.jobs[first].decoding:
                first += 1
            while first <= last and not self.jobs[last].decoding:
                last -= 1
            if first >= last:
                return first
            self._swap(self.jobs, first, last)

    def release_all(self) -> list[Job]:
        """Take all rows away and leave nothing for reuse; return the jobs in the order of their rows."""
        jobs, self.jobs = self.jobs, []
        self._free = [self._empty() for _ in range(self.kv.num_rows)]
        return jobs

    def _free_row_of(self, job: Job) -> _FreeRow:
        if job.epoch != self.epoch or not job.num_computed:
            return self._empty()
        self._tick += 1
        tokens = np.array(job.tokens[: job.num_computed], dtype=np.int32)
        return _FreeRow(tokens=tokens, cache_key=job.cache_key, epoch=job.epoch, tick=self._tick)

    def _longest_prefix(self, job: Job) -> tuple[int | None, int]:
        limit = job.target - 1 if job.max_new_tokens else job.target
        if job.call.logprob_start is not None:
            limit = min(limit, job.call.logprob_start)
        best: tuple[int | None, int] = (None, 0)
        wanted = job.prompt if job.num_prompt == len(job.tokens) else np.array(job.tokens, dtype=np.int32)
        for row in range(self.kv.num_rows):
            shared = min(_common(wanted, self._reusable(row, job)), limit)
            if shared >= _SHORTEST_REUSE_TOKENS and shared > best[1]:
                best = (row, shared)
        return best

    def _reusable(self, row: int, job: Job) -> TokenArray:
        """Return the tokens whose keys and values in the row the job may reuse."""
        if row < len(self.jobs):
            other = self.jobs[row]
            fits = other.epoch == self.epoch and other.cache_key == job.cache_key
            return other.prompt[: other.num_computed] if fits else _NOTHING
        left = self._free[row]
        return left.tokens if left.epoch == self.epoch and left.cache_key == job.cache_key else _NOTHING

    def _make_room(self, row: int, spare: int | None = None) -> None:
        """Make row `row` free for overwriting: discard the row that was left longest ago, but never `spare`."""
        free = [index for index in range(row, self.kv.num_rows) if index != spare] or [row]
        victim = min(free, key=lambda index: self._free[index].tick)
        if victim != row:
            self.kv.copy(row, victim, self._used(row))
            self._free[victim] = self._free[row]

    def _swap(self, contents: list[Any], one: int, other: int) -> None:
        """Swap two rows, in the cache and in `contents`; both belong to jobs, or neither does."""
        if one != other:
            self.kv.swap(one, self._used(one), other, self._used(other))
            contents[one], contents[other] = contents[other], contents[one]

    def _used(self, row: int) -> int:
        return self.jobs[row].num_computed if row < len(self.jobs) else len(self._free[row].tokens)

    def _reserve(self, num_tokens: int) -> None:
        self.kv.reserve(num_tokens, [self._used(row) for row in range(self.kv.num_rows)])


def _common(one: TokenArray, other: TokenArray) -> int:
    size = min(len(one), len(other))
    if not size:
        return 0
    differs = one[:size] != other[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
