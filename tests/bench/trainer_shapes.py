"""What the trainer's arms compute: one model, the same answers, the same loss. Torch and transformers alone.

B answers, T response tokens; suffixes name the axes.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 151_936
WIDTH, LAYERS = 1024, 8
BUDGET_TOKENS = 16_384  # of a pass, divided as all lengths are
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
SAMPLED_NUMBERS = 65_536  # of each parameter's gradient, to be held against another arm's


class Shape(NamedTuple):
    """How much smaller than the full shape all is; width and vocabulary together, so that the head keeps its share."""

    lengths_divided_by: int = 10
    width_divided_by: int = 4

    @property
    def vocabulary(self) -> int:
        """Tokens."""
        return VOCABULARY // self.width_divided_by

    @property
    def budget_tokens(self) -> int:
        """Of a pass."""
        return BUDGET_TOKENS // self.lengths_divided_by


class Answer(NamedTuple):
    """Tokens to learn, after those that were answered."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    advantage: float


class Conversation(NamedTuple):
    """A row that holds answers one after the other, each with its prompt before it."""

    ids: tuple[int, ...]
    answers: tuple[int, ...]  # their numbers


def answers(load: str, shape: Shape) -> list[Answer]:
    """Return the answers of a load.

    `sessions`: one of 10 turns of 200 + 200 tokens after a system prompt of 3,000, each prompt with all before it.
    `several`: three such of 3, 5 and 7 turns, each after a system prompt of its own.
    `one_agent`: the same three after one system prompt.
    `forks`: one of 5 turns; each prompt is answered twice, and the conversation goes on with the second answer. After
    the third turn the client tells the history in other words, 400 tokens of them.
    `rendered_again`: `sessions` by a template that renders earlier answers otherwise than they were sampled.
    `single`: 16 turns of 512 + 256 that have nothing in common.
    """
    rng = random.Random(load)

    def some(num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(shape.vocabulary) for _ in range(num_tokens // shape.lengths_divided_by))

    if load == "single":
        return [Answer(some(512), some(256), rng.choice((-1.0, 1.0))) for _ in range(16)]

    def session(system: tuple[int, ...], num_turns: int, num_sampled: int = 1, retold_after: int = 0) -> list[Answer]:
        found, prompt = [], system
        for turn in range(1, num_turns + 1):
            prompt += some(200)
            found += [Answer(prompt, some(200), rng.choice((-1.0, 1.0))) for _ in range(num_sampled)]
            prompt += some(200) if load == "rendered_again" else found[-1].response_ids
            if turn == retold_after:
                prompt = system + some(400)
        return found

    if load == "forks":
        return session(some(3000), 5, num_sampled=2, retold_after=3)
    if load in ("several", "one_agent"):
        system = some(3000)
        return [a for turns in (3, 5, 7) for a in session(system if load == "one_agent" else some(3000), turns)]
    return session(some(3000), 10)


def conversations(some: Sequence[Answer]) -> list[Conversation]:
    """Return the fewest rows that hold all answers: one that goes on from where a row ends is put into that row."""
    rows: list[Conversation] = []
    for number, answer in enumerate(some):
        goes_on = (i for i, row in enumerate(rows) if answer.prompt_ids[: len(row.ids)] == row.ids)
        at = next(goes_on, len(rows))
        before = rows[at].answers if at < len(rows) else ()
        rows[at : at + 1] = [Conversation(answer.prompt_ids + answer.response_ids, (*before, number))]
    return rows


def build(folder: Path, shape: Shape) -> dict[str, int]:
    """Write a model of Qwen3 0.6B's shape, but for its depth, with random weights; return what it is."""
    torch.manual_seed(0)
    width = WIDTH // shape.width_divided_by
    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=LAYERS,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, head_dim=128,
        max_position_embeddings=40_960, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    num_parameters = sum(p.numel() for p in model.parameters())
    return {"width": width, "layers": LAYERS, "vocabulary": shape.vocabulary, "parameters": num_parameters}


def loss(logp_BT: Tensor, advantage_B: Tensor) -> Tensor:
    """Return PPO's clipped objective at the weights that sampled, each answer's mean, summed; NaN: past its end."""
    kept_BT = logp_BT.isfinite()
    new_BT = torch.where(kept_BT, logp_BT, logp_BT.new_zeros(()))
    ratio_BT = (new_BT - new_BT.detach()).exp()
    free_BT = -ratio_BT * advantage_B.unsqueeze(1)
    clipped_BT = -ratio_BT.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage_B.unsqueeze(1)
    loss_BT = torch.where(kept_BT, torch.maximum(free_BT, clipped_BT), logp_BT.new_zeros(()))
    return (loss_BT.sum(1) / kept_BT.sum(1)).sum()


def left_padded(some: Sequence[Answer], prompt_tokens: int) -> tuple[Tensor, Tensor]:
    """Return ids and mask [B, L] as transformers' collators make them, prompts filled up on their left."""
    rows, masks = [], []
    longest = max(len(a.response_ids) for a in some)
    for a in some:
        left, right = prompt_tokens - len(a.prompt_ids), longest - len(a.response_ids)
        rows.append([0] * left + [*a.prompt_ids, *a.response_ids] + [0] * right)
        masks.append([0] * left + [1] * (len(rows[-1]) - left - right) + [0] * right)
    return torch.tensor(rows), torch.tensor(masks)


def response_masked(rows: Sequence[Conversation], some: Sequence[Answer]) -> tuple[Tensor, Tensor]:
    """Return ids [B, L] filled up on their right, and which of them are response tokens."""
    ids_BL = torch.zeros(len(rows), max(len(row.ids) for row in rows), dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids_BL[number, : len(row.ids)] = torch.tensor(row.ids)
        for answer in (some[i] for i in row.answers):
            start = len(answer.prompt_ids)
            mask_BL[number, start : start + len(answer.response_ids)] = True
    return ids_BL, mask_BL


def sampled_gradient(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return numbers of each parameter's gradient at fixed places, evenly spread."""
    found = {}
    for name, parameter in parameters.items():
        assert parameter.grad is not None, f"{name} has no gradient"
        flat = parameter.grad.flatten()
        found[name] = flat[:: max(1, len(flat) // SAMPLED_NUMBERS)].clone()
    return found
