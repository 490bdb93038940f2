"""Short answers by a model that is in the trainer's hands, sampled as engines sample them: from all of its tokens.

B rows, L tokens of a padded prompt, V the vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from clawstream.training.answers import Suffix
from clawstream.training.microbatches import micro_batches
from clawstream.training.torch_model import TorchModel


class Answer(NamedTuple):
    """What was written."""

    token_ids: tuple[int, ...]  # without the one that ends it
    ended: bool | None  # False: it was cut off; None: the model names no token that ends an answer


@torch.no_grad()
def write(
    model: TorchModel, questions: Sequence[Suffix], *, limit_tokens: int, seed: int, budget_tokens: int = 16_384
) -> list[Answer] | None:
    """Return an answer to each question's prompt, at its temperature; None: a probability was not finite.

    So many tokens are computed at once at most; they and the seed decide what is drawn.
    """
    lengths = [len(question.prompt_ids) + limit_tokens for question in questions]
    found: dict[int, Answer] = {}
    with model.unpacked():
        for number, group in enumerate(micro_batches(lengths, budget_tokens=budget_tokens)):
            answers = _write(model, [questions[i] for i in group], limit_tokens=limit_tokens, seed=seed + number)
            if answers is None:
                return None
            found |= zip(group, answers, strict=True)
    return [found[i] for i in range(len(questions))]


def _write(model: TorchModel, questions: Sequence[Suffix], *, limit_tokens: int, seed: int) -> list[Answer] | None:
    ids_BL, mask_BL = _padded(questions, model.device)
    scale_B1 = torch.tensor([[q.scale] for q in questions], device=model.device)
    ends = torch.tensor(_ends(model), device=model.device)
    draw = torch.Generator(model.device).manual_seed(seed)
    ended_B = torch.zeros(len(questions), dtype=torch.bool, device=model.device)
    written: list[Tensor] = []
    cache = None
    inputs_BL, places_BL = ids_BL, (mask_BL.cumsum(1) - 1).clamp(min=0)
    for _ in range(limit_tokens):
        said = model.core(
            input_ids=inputs_BL, attention_mask=mask_BL, position_ids=places_BL, past_key_values=cache,
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        cache = said.past_key_values
        chances_BV = (said.logits[:, -1].float() / scale_B1).softmax(1)
        if not bool(chances_BV.isfinite().all()):
            return None
        inputs_BL = torch.multinomial(chances_BV, 1, generator=draw)
        written.append(inputs_BL)
        ended_B |= torch.isin(inputs_BL.squeeze(1), ends)
        if bool(ended_B.all()):
            break
        mask_BL = torch.cat([mask_BL, torch.ones_like(inputs_BL)], 1)
        places_BL = places_BL[:, -1:] + 1
    return [_answer(row, ends.tolist()) for row in torch.cat(written, 1).tolist()]


def _padded(questions: Sequence[Suffix], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the prompts [B, L], padded on the left, and which tokens are theirs."""
    width = max(len(q.prompt_ids) for q in questions)
    ids_BL = torch.zeros((len(questions), width), dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL)
    for row, question in enumerate(questions):
        ids_BL[row, width - len(question.prompt_ids) :] = torch.tensor(question.prompt_ids)
        mask_BL[row, width - len(question.prompt_ids) :] = 1
    return ids_BL.to(device), mask_BL.to(device)


def _ends(model: TorchModel) -> list[int]:
    """Return the tokens that end an answer, as the model's own configuration names them."""
    named = model.core.generation_config.eos_token_id
    if named is None:
        return []
    return list(named) if isinstance(named, (list, tuple)) else [named]


def _answer(token_ids: list[int], ends: list[int]) -> Answer:
    for place, token in enumerate(token_ids):
        if token in ends:
            return Answer(tuple(token_ids[:place]), ended=True)
    return Answer(tuple(token_ids), ended=False if ends else None)
