"""How the next token is drawn, for a whole batch at once, from logits changed as requests and grammars ask.

A draw is a function of (seed, index of the token in the answer) and of the row's own logits, so a seeded request gives
the same tokens whatever else is in the batch. Axes: B rows, V vocabulary, K top log-probs.

Logits change in SGLang's order and by its rules: additive penalties, then the repetition penalty, then the biases, then
the grammar, all before the temperature. A penalty counts the answer's tokens, not the prompt's.

A grammar knows tokens by their text. It may produce the special tokens that templates write as text, but no others;
tokens that end an answer are allowed where the grammar may end.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from
from tokenizers import Tokenizer
from torch import Tensor

from clawstream.events import Shaping
from clawstream.inference.dialect import RequestRefused
from clawstream.inference.engine import SamplingParams
from clawstream.local.engine.rows import Job
from clawstream.rendering.encoding import token_bytes

_LEAST = 1e-30  # a smaller repetition penalty would make logits that are not finite
_MAX_REMAINDERS = 10_000  # llguidance makes a state of each: 2 million took 52 s and 1.4 GB


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Tokens and their log-probs, row by row; top log-probs as (log-prob, id) where a row asked for them."""

    token_ids: list[int]
    logprobs_nats: list[float]
    top: list[list[tuple[float, int]]]


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """One number in (0, 1) per row, by the finalizer of splitmix64 over seed and index."""
    state = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    steps = np.array(indices, dtype=np.uint64) + np.uint64(1)
    state = _mixed(_mixed(state) + steps * np.uint64(0x9E3779B97F4A7C15))
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mixed(state: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def scaled_logprobs(logits_BV: Tensor, temperatures: Sequence[float]) -> Tensor:
    """[B, V] float32, nats, at each row's temperature; 0 (greedy) counts as 1."""
    logits_BV = logits_BV.float()
    if any(value not in (0.0, 1.0) for value in temperatures):
        logits_BV = logits_BV / torch.tensor([value or 1.0 for value in temperatures]).unsqueeze(1)
    return torch.log_softmax(logits_BV, dim=-1)


def draw(
    logits_BV: Tensor, samplings: Sequence[SamplingParams], seeds: Sequence[int], indices: Sequence[int], num_top: int
) -> Draw:
    """Draw the next token of each row; return it with its log-prob before top-p, top-k and min-p."""
    logp_BV = scaled_logprobs(logits_BV, [sampling.temperature for sampling in samplings])
    greedy = [sampling.temperature == 0.0 for sampling in samplings]
    if all(greedy):
        tokens_B1 = logp_BV.argmax(dim=-1, keepdim=True)
    else:
        kept_BV = _filtered(logp_BV.exp(), samplings)
        total_BV = kept_BV.cumsum(dim=-1, dtype=torch.float64)
        wanted_B1 = torch.from_numpy(uniforms(seeds, indices)).unsqueeze(1) * total_BV[:, -1:]
        tokens_B1 = torch.searchsorted(total_BV, wanted_B1).clamp_(max=logp_BV.shape[1] - 1)
        if any(greedy):
            tokens_B1 = torch.where(torch.tensor(greedy).unsqueeze(1), logp_BV.argmax(dim=-1, keepdim=True), tokens_B1)
    return Draw(
        token_ids=tokens_B1.squeeze(1).tolist(),
        logprobs_nats=logp_BV.gather(1, tokens_B1).squeeze(1).tolist(),
        top=top_logprobs(logp_BV, num_top) if num_top else [],
    )


def top_logprobs(logp_BV: Tensor, num_top: int) -> list[list[tuple[float, int]]]:
    """The `num_top` most likely tokens of each row, most likely first."""
    value_BK, index_BK = logp_BV.topk(min(num_top, logp_BV.shape[1]), dim=-1)
    return [
        list(zip(values, ids, strict=True)) for values, ids in zip(value_BK.tolist(), index_BK.tolist(), strict=True)
    ]


def _filtered(prob_BV: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    """Probabilities with what top-k, top-p and min-p exclude set to 0, in vocabulary order."""
    min_p = [0.0 if s.shaping is None else s.shaping.min_p for s in samplings]
    if all((s.top_k is None or s.temperature == 0.0) and s.top_p == 1.0 for s in samplings) and not any(min_p):
        return prob_BV
    size = prob_BV.shape[1]
    sorted_BV, order_BV = prob_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    top_k_B1 = torch.tensor([size if s.top_k is None else s.top_k for s in samplings]).unsqueeze(1)
    top_p_B1 = torch.tensor([s.top_p for s in samplings]).unsqueeze(1)
    excluded_BV = (torch.arange(size).unsqueeze(0) >= top_k_B1) | ((before_BV > top_p_B1) & (top_p_B1 < 1.0))
    excluded_BV |= sorted_BV < sorted_BV[:, :1] * torch.tensor(min_p).unsqueeze(1)
    return prob_BV.scatter(1, order_BV, sorted_BV.masked_fill(excluded_BV, 0.0))


def shaped(logits_BV: Tensor, jobs: Sequence[Job]) -> Tensor:
    """Return the logits of each job's next token as its request shapes them; rows of other jobs are unchanged."""
    if all(job.call.request.sampling.shaping is None for job in jobs):
        return logits_BV
    logits_BV = logits_BV.float().clone()
    for logits_V, job in zip(logits_BV, jobs, strict=True):
        shaping = job.call.request.sampling.shaping
        if shaping is not None:
            _shape(logits_V, shaping, job.tokens[job.num_prompt :], job.stop_ids)
        if job.grammar is not None:
            job.grammar.mask(logits_V)
    return logits_BV


def _shape(logits_V: Tensor, shaping: Shaping, said: Sequence[int], stop_ids: frozenset[int]) -> None:
    if said:
        ids, counts = torch.unique(torch.tensor(said), return_counts=True)
        value = logits_V[ids] - shaping.frequency_penalty * counts - shaping.presence_penalty
        factor = max(shaping.repetition_penalty, _LEAST)
        logits_V[ids] = torch.where(value < 0, value * factor, value / factor)
    if len(said) < shaping.min_new_tokens:
        logits_V[[token for token in stop_ids if token < len(logits_V)]] = -torch.inf
    for biased in shaping.logit_bias:
        logits_V[biased.token_id] += biased.bias


class GrammarTokenizer:
    """The vocabulary as llguidance needs it: each token's bytes, and which tokens are no text."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id: int | None = None
        found = token_bytes(tokenizer)
        self.special_token_ids = [number for number, said in enumerate(found) if said is None] + [eos_token_id]
        self.tokens = [b"" if said is None else said for said in found]

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


class Grammars:
    """One model's vocabulary, in the form that grammars use."""

    def __init__(self, file: Path, eos_token_id: int) -> None:
        wrapped = TokenizerWrapper(GrammarTokenizer(Tokenizer.from_file(str(file)), eos_token_id))
        self._tokenizer = LLTokenizer(wrapped)

    def matcher(self, shaping: Shaping, stop_ids: frozenset[int]) -> "Matcher":
        """Return a matcher at the grammar's beginning; raises RequestRefused for an invalid grammar."""
        kind, said = next(
            (kind, said)
            for kind, said in (("json_schema", shaping.json_schema), ("regex", shaping.regex), ("ebnf", shaping.ebnf))
            if said is not None
        )
        if kind == "json_schema":
            _check_multiples(said)
        try:
            matcher = LLMatcher(self._tokenizer, grammar_from(kind, said), log_level=0)
            problem = matcher.get_error()
        except ValueError as error:
            problem = str(error)
        if problem:
            raise RequestRefused(f"{kind} is no grammar that this engine can follow: {problem[:500]}")
        return Matcher(matcher, stop_ids)


class Matcher:
    """One answer's place in its grammar."""

    def __init__(self, matcher: LLMatcher, stop_ids: Iterable[int]) -> None:
        self._matcher = matcher
        self._stop_ids = list(stop_ids)

    def mask(self, logits_V: Tensor) -> None:
        """Make every token impossible that can't come next."""
        allowed_V = torch.zeros(len(logits_V), dtype=torch.bool)
        if not self._matcher.is_stopped():
            found = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8).bool()
            size = min(len(found), len(allowed_V))
            allowed_V[:size] = found[:size]
        if self._matcher.is_stopped() or self._matcher.is_accepting() or not allowed_V.any():
            allowed_V[[token for token in self._stop_ids if token < len(allowed_V)]] = True
        logits_V.masked_fill_(~allowed_V, -torch.inf)

    def take(self, token: int) -> None:
        if token not in self._stop_ids:
            self._matcher.consume_token(token)


def _check_multiples(schema: str) -> None:
    """Raise RequestRefused where `multipleOf` needs more states than can be made while other requests wait."""
    try:
        steps = [*_multiples(json.loads(schema))]
    except ValueError:
        return  # llguidance says what is wrong with it
    scale = math.lcm(*(step.denominator for step in steps))
    if math.lcm(*(int(step * scale) for step in steps)) > _MAX_REMAINDERS:
        raise RequestRefused(
            f"json_schema is no grammar that this engine can follow: the least common multiple of its multipleOf is "
            f"over {_MAX_REMAINDERS}; ask for a smaller step, or check the number yourself"
        )


def _multiples(schema: object) -> Iterator[Fraction]:
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            step = part.get("multipleOf")
            if isinstance(step, int | float) and math.isfinite(step) and step > 0:
                yield Fraction(str(step))
            left += part.values()
        elif isinstance(part, list):
            left += part


@lru_cache(maxsize=1)
def grammars_of(model_path: str, eos_token_id: int) -> Grammars:
    """Return the grammars of the model in a folder, made once."""
    return Grammars(Path(model_path) / "tokenizer.json", eos_token_id)
