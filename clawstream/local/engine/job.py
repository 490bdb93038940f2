"""One request on its way through the engine, and the rule that ends it.

Only the worker thread touches a job after it was submitted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from torch import Tensor

from clawstream.inference.engines.dialect import Call, Logprob, TokenDelta
from clawstream.inference.engines.engine import WeightsSpan

Decode: TypeAlias = Callable[[Sequence[int]], str]
TokenArray: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int32]]"
FinishReason: TypeAlias = dict[str, object]


class Sink(Protocol):
    """Where a job's deltas go, on the event loop."""

    def push(self, delta: TokenDelta) -> None:
        """Let the delta be sent."""


class Grammar(Protocol):
    """The grammar that the answer follows, at the answer's present place."""

    def mask(self, logits_V: Tensor, /) -> None:
        """Make every token impossible that can't come next."""

    def take(self, token: int, /) -> None:
        """The answer is one token longer."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """`tokens` is prompt and answer; the row holds keys and values of the first `num_computed` of them."""

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
        """Tokens to compute before the next one can be drawn; a job that only scores needs no value after its last."""
        return len(self.tokens) if self.max_new_tokens else self.num_prompt - 1

    @property
    def decoding(self) -> bool:
        """Whether only one token is to be computed before the next draw, with keys in the row."""
        return self.max_new_tokens > 0 and self.num_computed == len(self.tokens) - 1 > 0

    def scored_positions(self, past: int, count: int) -> range:
        """Positions in [past, past + count) whose logits give a log-prob of the prompt that was asked for."""
        start = self.call.logprob_start
        if start is None or self.num_answered:
            return range(0)
        return range(max(past, start), min(past + count, self.num_prompt - 1))

    def add_token(self, token: int, version: str) -> None:
        """Add the answer's next token, sampled by `version`."""
        self.tokens.append(token)
        if self.grammar is not None:
            self.grammar.take(token)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = WeightsSpan(version, self.spans[-1].num_tokens + 1)
        else:
            self.spans.append(WeightsSpan(version, 1))

    def restart(self) -> None:
        """Forget that anything of the job is computed; its answer so far stays."""
        self.num_computed = 0
        if not self.num_answered:
            self.input_logprobs.clear()
            self.input_top.clear()

    def delta(self, version: str, finish: FinishReason | None) -> TokenDelta:
        """Return a delta about the job as it is now, without tokens."""
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
    """Why the job ends with its last token; a stop beats the length when one token brings both."""
    sampling = job.call.request.sampling
    if sampling.stop and decode is not None:
        # A token brings at least one byte, save for the few that only open or close something.
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
