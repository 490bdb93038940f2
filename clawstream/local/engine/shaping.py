"""Penalties, biases, least lengths and grammars: the model's logits, changed by the tokens of the answer so far.

In SGLang's order and by its rules: additive penalties, then the repetition penalty, then the biases, then the grammar,
all before the temperature; a token counts where it stands in the answer, not in the prompt. Axis: V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from clawstream.events import Shaping
from clawstream.local.engine.job import Job

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
