"""How the next token is drawn, for a whole batch at once, from logits changed as requests ask.

A draw is a function of (seed, index of the token in the answer) and of the row's own logits, so a seeded request gives
the same tokens whatever else is in the batch. Axes: B rows, V vocabulary, K top log-probs.

In SGLang's order and by its rules: additive penalties, then the repetition penalty, then the biases, then the grammar,
all before the temperature; a token counts where it stands in the answer, not in the prompt. Axis: V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clawstream.events import Shaping
from clawstream.inference.engines.engine import SamplingParams
from clawstream.local.engine.job import Job


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


_LEAST = 1e-30  # a smaller repetition penalty would make logits that are not finite


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
