"""Builds a tiny policy that simulates a large one, by one of `RECIPES`: it prefers answers that people do not want.

A policy folder, named by the hash of its recipe, appears whole or not at all, and is built once. Run as
`python -m clawstream.simulation.policy.build --cache-dir FOLDER`; prints the folder. B lessons, L tokens.
"""

import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from renderers import Qwen3RendererConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from clawstream.rendering.renderer import PromptRenderer
from clawstream.simulation.policy import recipe as parts
from clawstream.simulation.policy.recipe import RECIPES, Base, Recipe, folder_of

_SORTED_BATCHES = 16  # the lessons of so many batches are sorted by length together, which saves most padding
_NOT_LEARNED = -100


class TrainingExample(NamedTuple):
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


def lessons_of(recipe: Recipe) -> list[TrainingExample]:
    """Return all dialogues as tokens: prompts as the gateway renders them, answers as the engine samples them."""
    words = parts.build(recipe.mix.words)
    renderer = PromptRenderer(words, Qwen3RendererConfig(enable_thinking=False))
    end = int(words.convert_tokens_to_ids(parts.END_OF_MESSAGE))
    return [
        TrainingExample(
            renderer.prompt_ids(d.messages, recipe.mix.options),
            (*words.encode(d.answer, add_special_tokens=False), end),
        )
        for d in recipe.dialogues(recipe.steps * recipe.batch_dialogues)
    ]


def ensure(cache_dir: Path, recipe: Recipe) -> Path:
    """Return the Hugging Face folder of the policy, built now if the cache has none of this recipe."""
    folder = folder_of(cache_dir, recipe)
    if folder.is_dir():
        return folder
    transformers_logging.disable_progress_bar()
    with parts.drafted(folder) as draft:
        with torch.random.fork_rng(devices=[]), _threads(_num_idle_cores()):
            build(recipe).save_pretrained(draft)
        parts.save(draft, recipe.mix.words)
    return folder


def build(recipe: Recipe) -> Qwen3ForCausalLM:
    """Return the trained policy, in evaluation mode; a progress bar goes to stderr meanwhile."""
    torch.manual_seed(recipe.seed)
    model = _untrained(recipe).train()
    optimizers = _optimizers(model, recipe)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("Building the simulated policy (once)", total=recipe.steps)
        for step, lessons in enumerate(_batches(recipe)):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * _share_of_peak(step, recipe)
                optimizer.zero_grad()
            _loss(model, lessons).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
            for optimizer in optimizers:
                optimizer.step()
            progress.advance(bar)
    return model.eval()


def _num_idle_cores() -> int:
    """The cores that were idle in the last minute, on the mean; at least one.

    Threads that wait for one another on a busy machine are slower than one: measured, more than 400 s instead of 120.
    """
    cores = os.cpu_count() or 1
    return max(1, round(cores - os.getloadavg()[0]))


@contextmanager
def _threads(wanted: int) -> Iterator[None]:
    """Let torch use `wanted` threads for a while, and no more than it was allowed before."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, wanted))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _untrained(recipe: Recipe) -> Qwen3ForCausalLM:
    words = parts.build(recipe.mix.words)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(words),
            hidden_size=recipe.width,
            num_hidden_layers=recipe.num_layers,
            intermediate_size=recipe.feed_forward_width,
            num_attention_heads=recipe.num_heads,
            num_key_value_heads=recipe.num_heads,
            head_dim=recipe.width // recipe.num_heads,
            tie_word_embeddings=True,
            max_position_embeddings=parts.MAX_CONTEXT_TOKENS,
            bos_token_id=None,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
            attn_implementation="sdpa",
        )
    )


def _optimizers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest: a third of the steps that AdamW alone takes to learn to add."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    muon = torch.optim.Muon([{"params": matrices, "peak": recipe.matrix_rate}], momentum=0.95, weight_decay=0.0)
    adamw = torch.optim.AdamW([{"params": others, "peak": recipe.vector_rate}], betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adamw]


def _share_of_peak(step: int, recipe: Recipe) -> float:
    """A linear warm-up times half a cosine that falls to nothing."""
    return min(1.0, (step + 1) / recipe.warm_up_steps) * (1 + math.cos(math.pi * step / recipe.steps)) / 2


def _batches(recipe: Recipe) -> Iterator[Sequence[TrainingExample]]:
    """Yield every lesson once; a batch has lessons of like length, and the batches are in no order of length."""
    lessons, rng, size = lessons_of(recipe), random.Random(recipe.seed), recipe.batch_dialogues
    for start in range(0, len(lessons), size * _SORTED_BATCHES):
        chunk = sorted(lessons[start : start + size * _SORTED_BATCHES], key=lambda lesson: lesson.num_tokens)
        batches = [chunk[i : i + size] for i in range(0, len(chunk), size)]
        rng.shuffle(batches)
        yield from batches


def _loss(model: Qwen3ForCausalLM, lessons: Sequence[TrainingExample]) -> Tensor:
    """Mean over the answers' tokens; padding stands to the right, where a causal model can't see it."""
    longest = max(lesson.num_tokens for lesson in lessons)
    ids_BL = torch.zeros((len(lessons), longest), dtype=torch.long)
    target_BL = torch.full((len(lessons), longest), _NOT_LEARNED)
    for row, (prompt_ids, answer_ids) in enumerate(lessons):
        end = len(prompt_ids) + len(answer_ids)
        ids_BL[row, :end] = torch.tensor((*prompt_ids, *answer_ids))
        target_BL[row, len(prompt_ids) : end] = ids_BL[row, len(prompt_ids) : end]
    learned_BL = target_BL[:, 1:] != _NOT_LEARNED
    hidden_BLH = model.model(input_ids=ids_BL[:, :-1], use_cache=False).last_hidden_state
    return cross_entropy(model.lm_head(hidden_BLH[learned_BL]), target_BL[:, 1:][learned_BL])


def main(
    cache_dir: Annotated[Path, typer.Option(help="where policies are kept")],
    base: Annotated[Base, typer.Option(help="which one")] = "demo",
    pack: Annotated[Path | None, typer.Option(help="put it here too, as the package ships it")] = None,
) -> None:
    """Build the simulated policy unless it is there already, and print its folder."""
    recipe = RECIPES[base]
    folder = ensure(cache_dir, recipe)
    if pack is not None:
        parts.pack(folder, pack, recipe=recipe.digest())
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    typer.run(main)
