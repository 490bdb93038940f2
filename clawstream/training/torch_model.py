"""A Hugging Face causal model as training needs it, with attention over packed rows.

The attention is registered with transformers, so every family that looks its attention up there uses it. It calls
torch's own attention for each block of the row, with a mask of that block or none. So no mask grows with the square of
the row, and segments that see nothing of each other are not multiplied. The backward pass gathers a masked block's keys
and values again: to keep them would copy, for each block, all that stands before it. B rows, L tokens of a row, Q
tokens of a block, S tokens they may see, N response tokens of all rows, V the vocabulary, H the model's width.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from clawstream.errors import ConfigError, UnusableCheckpoint
from clawstream.training.base_folder import (
    STEM,
    changes_with_length,
    checkpoint_layers,
    copy_words,
    freeze_in,
    loaded_core,
    saved_name,
    stored,
    stored_dtype,
    with_adapter,
)
from clawstream.training.footprint import DENSE_FAMILIES
from clawstream.training.model import AnswerTensors, Model, Read, ScoreGroup
from clawstream.training.step.losses import Answers, Suffix
from clawstream.training.step.packing import Pack, forks, pack, packed_batches, side_by_side

NAME = "clawstream_tree"
FAMILIES = DENSE_FAMILIES  # whose answers may be computed in one row
LARGE_TOKENS = 1024  # at most, of a block that needs a mask
SMALL_TOKENS = 256  # subtrees side by side are one block up to so many: a mask costs less than another call
ALONE_TOKENS = 32  # from so many on, what sees itself alone is a block without a mask, which costs a CPU less
log = logging.getLogger(__name__)
SHARD = "1GB"  # of a published version's files: they are hashed side by side
SCORED_BYTES = 2**20  # of logits scored at once on a CPU, so that its cache holds them from one operation to the next
SCORED_ROWS = 512  # and elsewhere, so that this takes little more memory than the logits have
SAME_NATS = 1e-3  # how far two computations of a log-prob may differ


class AttentionBlock(NamedTuple):
    """Tokens that attend at once, to blocks before them and to themselves."""

    start: int  # in the row
    end: int
    seen: tuple[int, ...]  # the numbers of the earlier blocks that it sees
    mask_QS: Tensor | None  # None: it sees itself alone, causally


def small_tokens(device: torch.device) -> int:
    """Return how many tokens subtrees side by side may have to be one block: calls cost a GPU more than masks."""
    return SMALL_TOKENS if device.type == "cpu" else LARGE_TOKENS


class Tree:
    """The blocks of a pack, made once for all layers of a pass."""

    def __init__(self, pack: Pack, device: torch.device) -> None:
        self._segments = pack.segments
        self._positions = pack.positions
        self._position_L = torch.tensor(pack.positions, device=device)
        ends = torch.tensor([s.subtree_end for s in pack.segments])
        self._seen_until_L = ends.repeat_interleave(torch.tensor([s.end - s.start for s in pack.segments])).to(device)
        alone_tokens = ALONE_TOKENS if device.type == "cpu" else None
        self._groups = side_by_side(pack.segments, small_tokens=small_tokens(device), alone_tokens=alone_tokens)
        self._blocks: dict[int | None, list[AttentionBlock]] = {}

    def blocks(self, window_tokens: int | None) -> list[AttentionBlock]:
        """Return the blocks in the order of the row; a token sees at most `window_tokens`, itself included."""
        if window_tokens not in self._blocks:
            self._blocks[window_tokens] = self._cut(window_tokens)
        return self._blocks[window_tokens]

    def _cut(self, window_tokens: int | None) -> list[AttentionBlock]:
        blocks: list[AttentionBlock] = []
        seen_below: dict[int | None, tuple[int, ...]] = {None: ()}  # by segment
        for number, after, end in self._groups:
            segment = self._segments[number]
            start, seen = segment.start, seen_below[segment.parent]
            alone = after == number + 1
            if alone and not seen and (window_tokens is None or end - start <= window_tokens):
                blocks.append(AttentionBlock(start, end, (), None))
                seen += (len(blocks) - 1,)
            else:
                for piece in pairwise((*range(start, end, LARGE_TOKENS), end)):
                    blocks.append(self._masked(blocks, *piece, seen, window_tokens))
                    seen += (len(blocks) - 1,)
            seen_below[number] = seen
        return blocks

    def _masked(
        self, blocks: list[AttentionBlock], start: int, end: int, seen: tuple[int, ...], window_tokens: int | None
    ) -> AttentionBlock:
        if window_tokens is not None:
            oldest = min(self._positions[start:end]) - window_tokens
            seen = tuple(number for number in seen if self._positions[blocks[number].end - 1] > oldest)
        device = self._position_L.device
        query_Q = torch.arange(start, end, device=device)
        before = (torch.arange(blocks[number].start, blocks[number].end, device=device) for number in seen)
        key_S, query_Q1 = torch.cat([*before, query_Q]), query_Q.unsqueeze(1)
        mask_QS = (key_S <= query_Q1) & (query_Q1 < self._seen_until_L[key_S])
        if window_tokens is not None:
            mask_QS &= self._position_L[query_Q1] - self._position_L[key_S] < window_tokens
        return AttentionBlock(start, end, seen, mask_QS)


def tree_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *,
    tree: Tree, scaling: float | None = None, sliding_window: int | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return, as transformers' attention functions do, each query's result [1, L, heads, width]; and no weights."""
    assert attention_mask is None, "who sees whom is the tree's to say"
    blocks = tree.blocks(sliding_window)
    sizes = [block.end - block.start for block in blocks]
    # Split once: a slice for each block would give each a gradient of the whole row's size.
    queries, keys, values = (torch.split(part.to(value.dtype), sizes, 2) for part in (query, key, value))
    outputs = []
    for number, block in enumerate(blocks):
        attend = partial(_attended, module, queries[number], keys, values, (*block.seen, number), scaling)
        if block.mask_QS is None:
            outputs.append(attend(None))
        else:
            outputs.append(checkpoint(attend, block.mask_QS[None, None], use_reentrant=False, preserve_rng_state=False))
    return _joined(outputs, range(len(outputs)), dim=1), None


def _attended(
    module: nn.Module, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], seen: Sequence[int],
    scaling: float | None, mask_11QS: Tensor | None,
) -> Tensor:  # fmt: skip
    key, value = _joined(keys, seen), _joined(values, seen)
    output: Tensor
    output, _weights = sdpa_attention_forward(module, query, key, value, mask_11QS, scaling=scaling)
    return output


def _joined(parts: Sequence[Tensor], numbers: Sequence[int], dim: int = 2) -> Tensor:
    return parts[numbers[0]] if len(numbers) == 1 else torch.cat([parts[number] for number in numbers], dim)


AttentionInterface.register(NAME, tree_attention)


class _Scores(torch.autograd.Function):
    """Log-probs [N, E] of ids with their gradient, and entropies [N] without one, some places at a time."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, ids_NE: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits_NV, ids_NE)
        logp_NE = logits_NV.new_empty(ids_NE.shape)
        entropy_N = logits_NV.new_empty(len(logits_NV) if entropy else 0)
        for at in _rows_at_once(logits_NV):
            logp_MV = logits_NV[at].log_softmax(1)
            torch.gather(logp_MV, 1, ids_NE[at], out=logp_NE[at])
            if entropy:
                # A token that can't come has a log-prob of -inf, and 0 of the entropy.
                entropy_N[at] = -(logp_MV.exp().mul_(logp_MV.clamp_(min=torch.finfo(logp_MV.dtype).min))).sum(1)
        ctx.mark_non_differentiable(entropy_N)
        return logp_NE, entropy_N

    @staticmethod
    def backward(ctx: Any, slope_NE: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, ids_NE = ctx.saved_tensors
        slope_NV = torch.empty_like(logits_NV)
        for at in _rows_at_once(logits_NV):
            slope_MV = torch.softmax(logits_NV[at], 1, out=slope_NV[at])
            slope_MV.mul_(-slope_NE[at].sum(1, keepdim=True)).scatter_add_(1, ids_NE[at], slope_NE[at])
        return slope_NV, None, None


def _rows_at_once(logits_NV: Tensor) -> list[slice]:
    on_cpu = logits_NV.device.type == "cpu"
    size = max(1, SCORED_BYTES // (4 * logits_NV.shape[1])) if on_cpu else SCORED_ROWS
    return [slice(start, start + size) for start in range(0, len(logits_NV), size)]


class TorchModel(Model):
    """A causal model; all of its weights are trained, or only those of a LoRA adapter.

    It stays in evaluation mode, so that equal weights give equal log-probs when training and when scoring.
    Answers are computed in one packed row where the model's family is known to allow it; else each in a padded row.
    """

    def __init__(self, folder: Path, core: Any, adapter: Any | None) -> None:
        self.folder = folder  # of the base
        self.packs = False
        self._core = core
        self._adapter = adapter
        self._dtype = torch.float32  # of matrix products
        self.trained: dict[str, nn.Parameter] = {n: p for n, p in core.named_parameters() if p.requires_grad}
        self.device = next(core.parameters()).device
        self.published_dtype = torch.float32 if adapter is not None else stored_dtype(folder)

    @classmethod
    def load(
        cls, folder: Path, *, lora_rank: int | None = None, device: str = "cpu", seed: int = 0,
        dtype: torch.dtype = torch.float32, recompute_layers: bool = False,
    ) -> "TorchModel":  # fmt: skip
        """Return the model of a Hugging Face folder; with a rank, frozen under an adapter that adds nothing yet.

        All matrices but the head's are multiplied in `dtype`; those under an adapter are kept in it. With
        `recompute_layers` the backward pass computes each layer again instead of keeping what is inside it; raises
        ConfigError for a model that can't do so.
        """
        core = cls.loaded(folder)
        if recompute_layers:
            checkpoint_layers(core)
        adapter = None if lora_rank is None else with_adapter(core, lora_rank, seed).eval()
        cls.place(core, adapter, dtype, device)
        model = cls(folder, core, adapter)
        model._check_head()
        model._pack_if_same()
        model._dtype = dtype
        return model

    @classmethod
    def loaded(cls, folder: Path) -> Any:
        """Return the model of transformers, in evaluation mode; raises UnusableCheckpoint where there is none."""
        return loaded_core(folder)

    @classmethod
    def place(cls, core: Any, adapter: PeftModel | None, dtype: torch.dtype, device: str) -> None:
        """Bring the model to the device, which may not have room for matrices in more than `dtype`."""
        freeze_in(adapter, dtype)
        core.to(device)

    @contextmanager
    def reading(self, mask_BL: Tensor) -> Iterator[Read]:
        cache = None

        def read(ids_BL: Tensor) -> Tensor:
            nonlocal mask_BL, cache
            if cache is not None:
                mask_BL = torch.cat([mask_BL, torch.ones_like(ids_BL)], 1)
            places_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)[:, -ids_BL.shape[1] :]
            with self._multiplying():
                output = self._core.get_decoder()(
                    input_ids=ids_BL, attention_mask=mask_BL, position_ids=places_BL, past_key_values=cache,
                    use_cache=True,
                )  # fmt: skip
            cache = output.past_key_values
            return self._logits(output.last_hidden_state[:, -1], torch.ones(len(ids_BL), device=self.device))

        if not self.packs:
            yield read
            return
        self._core.set_attn_implementation("sdpa")  # our attention knows neither caches nor padding
        try:
            yield read
        finally:
            self._core.set_attn_implementation(NAME)

    def groups(self, suffixes: Sequence[Suffix], *, budget_tokens: int) -> list[list[int]]:
        if self.packs:
            return packed_batches([s.read_ids for s in suffixes], budget_tokens=budget_tokens)
        return super().groups(suffixes, budget_tokens=budget_tokens)

    def save(self, folder: Path) -> None:
        if self._adapter is not None:
            self._adapter.save_pretrained(folder)
            return
        with self._rounded():
            self._core.save_pretrained(folder, max_shard_size=SHARD)
        copy_words(self.folder, folder)

    @torch.no_grad()
    def restore(self, folder: Path, masters: Path | None = None) -> None:
        readers: Mapping[str, Callable[[], Tensor | None]]
        if masters is not None:
            readers = dict(stored(masters.parent, masters.stem))
        elif self._adapter is not None:
            saved = load_file(folder / f"{STEM}.safetensors")
            readers = {name: partial(saved.get, saved_name(name)) for name in self.trained}
        else:
            readers = self._readers(folder)
        for name, parameter in self.trained.items():
            value = readers[name]() if name in readers else None
            if value is None or value.shape != parameter.shape:
                raise UnusableCheckpoint(
                    f"{folder}: {name} is {'missing' if value is None else tuple(value.shape)}, expected "
                    f"{tuple(parameter.shape)} as in {self.folder}. Nothing is trained. Name the base model, and the "
                    "LoRA rank, that this policy was started with."
                )
            parameter.copy_(self._part(value, parameter))

    def _readers(self, folder: Path) -> Mapping[str, Callable[[], Tensor]]:
        """Return a function for each weight that reads it from what `save` wrote."""
        return {name: p.detach for name, p in loaded_core(folder).named_parameters()}

    @contextmanager
    def _rounded(self) -> Iterator[None]:
        """Round all weights to the base's type, so that the saved files name that type."""
        exact = [(p, p.data) for p in self._core.parameters()]
        try:
            for parameter, data in exact:
                parameter.data = data.to(self.published_dtype)
            yield
        finally:
            for parameter, data in exact:
                parameter.data = data

    def _before_head(self, suffixes: Sequence[Suffix]) -> tuple[Answers, Tensor]:
        # Padded rows need no mask: padding stands to the right of what is read, where a causal model can't see it.
        packed = pack([s.read_ids for s in suffixes]) if self.packs else None
        answers = Answers(suffixes, self.device, packed)
        seen: dict[str, Any] = {}
        if packed is not None:
            positions_1L = torch.tensor([packed.positions], device=self.device)
            seen = {"position_ids": positions_1L, "tree": Tree(packed, self.device)}
        with self._multiplying():
            output = self._core.get_decoder()(input_ids=answers.ids_RL, use_cache=False, **seen)
        return answers, answers.before(output.last_hidden_state)

    @property
    def _head_rows(self) -> int:
        return int(self._core.get_output_embeddings().weight.shape[0])

    def _multiplying(self) -> torch.autocast:
        # Without autocast's cache, which keeps a copy of each matrix until the pass ends: none is used twice in it.
        return torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32, cache_enabled=False)

    def _logits(self, hidden_NH: Tensor, scale_N: Tensor) -> Tensor:
        # In float32, whatever the type of other products: a logit of 20 in half precision is off by up to 0.06 nats.
        head, scale_N1 = self._core.get_output_embeddings(), scale_N.unsqueeze(1)
        before = isinstance(head, nn.Linear) and head.bias is None  # states are narrower than logits
        hidden_NH = hidden_NH.float()
        logits_NV: Tensor = head(hidden_NH / scale_N1) if before else head(hidden_NH) / scale_N1
        return logits_NV

    def _scores(self, logits_NV: Tensor, ids_NE: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _Scores.apply(logits_NV, ids_NE, entropy)
        return found

    def _top_ids(self, logits_NV: Tensor, num_tokens: int) -> Tensor:
        return logits_NV.topk(num_tokens).indices

    def _in_groups(
        self, suffixes: Sequence[Suffix], scored: ScoreGroup, budget_tokens: int, *_: Any
    ) -> list[AnswerTensors]:
        found: dict[int, AnswerTensors] = {}
        for group in self.groups(suffixes, budget_tokens=budget_tokens):
            found |= zip(group, scored([suffixes[i] for i in group]), strict=True)
        return [found[i] for i in range(len(suffixes))]

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuse a family whose logits are not just its head on its last hidden state (soft caps, scales)."""
        ids_1L = torch.arange(4, device=self.device).unsqueeze(0)
        whole = self._core(input_ids=ids_1L, use_cache=False).logits.float().log_softmax(-1)
        expected = whole[0, [0, 1, 2], [1, 2, 3]]
        found = self.logprobs([Suffix([0], [1, 2, 3], 1.0)])[0]
        if not torch.allclose(found, expected, atol=SAME_NATS):
            raise ConfigError(
                f"{self.folder}: {type(self._core).__name__} changes its logits after its head: log-probs differ "
                f"by {float((found - expected).abs().max()):.3g} nats. Nothing is trained. Use a model without logit "
                "caps or scales."
            )

    @torch.no_grad()
    def _pack_if_same(self) -> None:
        """Compute answers in one row from here on, if this model gives the same results as in separate rows."""
        if self._core.config.model_type not in FAMILIES:
            log.info("packing=off model_type=%s reason=not known to allow it", self._core.config.model_type)
            return
        if changes_with_length(self._core.config):
            log.info("packing=off model=%s reason=its positions depend on the longest row of a pass", self.folder)
            return
        size = self._core.get_input_embeddings().weight.shape[0]
        example = [Suffix(*ids, 1.0) for ids in forks(size, small_tokens=small_tokens(self.device))]
        expected_N = torch.cat([self.logprobs([suffix])[0] for suffix in example])
        self.packs = True
        self._core.set_attn_implementation(NAME)
        found = zip(self.logprobs(example), example, strict=True)
        found_N = torch.cat([logp_T[: len(s.response_ids)] for logp_T, s in found])
        if not torch.allclose(found_N, expected_N, rtol=0, atol=SAME_NATS):
            self.packs = False
            self._core.set_attn_implementation("sdpa")
            difference_nats = float((found_N - expected_N).abs().max())
            log.warning(
                "packing=off model=%s reason=log-probs in one row differ by %.3g nats", self.folder, difference_nats
            )
