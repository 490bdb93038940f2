"""A causal language model from a folder, run over packed rows, with adapters, and weights replaced in place.

A folder is taken whole or not at all: every name and shape is checked before the first weight changes.

A step packs the tokens of all requests into one sequence [1, N]: first one token for each decoding row 0..B-1, then one
segment of prompt for each row that is being filled. Linear layers see N tokens at once; only attention knows which
token belongs to which row. Axes: N packed tokens, B decoding rows, H key-value heads, G query heads per key-value head,
L keys, D head width.

An adapter is a peft folder. Its products are added to the outputs of the linear layers it names, for the packed tokens
of its requests only, so loading and unloading never touch the base weights.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig

from clawstream.errors import PartUnavailable, UnusableCheckpoint
from clawstream.inference.model_folder import weight_files
from clawstream.local.engine.rows import KvRows

NAME = "clawstream_rows"
_CALL_COST_KEYS = 2048  # of one more attention call: so many keys does a batched call read in the same time
_TOLERANCE_NATS = 1e-2
SMALL_PARAMETERS = 20_000_000  # below this a model's weights stay in the processor's cache, and a cache takes little
_PACKS_HALVES = ("x86", "fbgemm")  # torch's names of its kernels for processors with AVX2
_FEW_TOKENS = 48  # packed: up to here a step waits for memory, and half of each weight is read in half the time
_PREFIX = "base_model.model."


class PromptSegment(NamedTuple):
    """Part of a prompt: packed tokens [first, last) of row `row`, which already holds `past` tokens."""

    row: int
    first: int
    last: int
    past: int
    mask_NL: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """Everything that attention needs to know about one forward pass."""

    kv: KvRows
    write_N: Tensor  # the cache entry, counted through all rows, that takes each packed token's key and value
    num_decoding: int  # B
    short_keys: int  # L: how many keys of each decoding row the batched call reads
    short_mask_B11L: Tensor | None  # True where the row has the key; None: each row has all L
    long_rows: tuple[tuple[int, int], ...]  # (row, number of keys) of each decoding row with a call of its own
    segments: tuple[PromptSegment, ...]


def plan_step(kv: KvRows, decode_lengths: Sequence[int], prefills: Sequence[tuple[int, int, int]]) -> ForwardPass:
    """Return the step: one token for each decoding row, then a segment of prompt for each of `prefills`.

    `decode_lengths[r]` is how many keys row r has, the new one included. A prefill is (row, past, count): `count`
    tokens of prompt behind the `past` that the row holds.
    """
    capacity = kv.capacity_tokens
    write = [row * capacity + length - 1 for row, length in enumerate(decode_lengths)]
    segments = []
    for row, past, count in prefills:
        first = len(write)
        write.extend(range(row * capacity + past, row * capacity + past + count))
        mask = torch.ones(count, past + count, dtype=torch.bool).tril_(past) if past and count > 1 else None
        segments.append(PromptSegment(row, first, first + count, past, mask))
    short_keys, long_rows = split_long_rows(decode_lengths)
    mask_B11L = None
    if decode_lengths and min(decode_lengths) < short_keys:
        lengths_B1 = torch.tensor(decode_lengths).unsqueeze(1)
        mask_B11L = (torch.arange(short_keys).unsqueeze(0) < lengths_B1).view(-1, 1, 1, short_keys)
    return ForwardPass(
        kv=kv,
        write_N=torch.tensor(write),
        num_decoding=len(decode_lengths),
        short_keys=short_keys,
        short_mask_B11L=mask_B11L,
        long_rows=tuple((row, decode_lengths[row]) for row in long_rows),
        segments=tuple(segments),
    )


def split_long_rows(lengths: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return how many keys a batched call reads in each row, and the rows that are so long that each gets its own call.

    Of all cuts through the sorted lengths, this is the one that reads the fewest keys.
    """
    if not lengths:
        return 0, ()
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    best_cost, best_cut, alone = lengths[order[0]] * len(lengths), 0, 0
    for cut in range(1, len(order)):
        alone += lengths[order[cut - 1]] + _CALL_COST_KEYS
        cost = alone + lengths[order[cut]] * len(lengths)
        if cost < best_cost:
            best_cost, best_cut = cost, cut
    return lengths[order[best_cut]], tuple(order[:best_cut])


def attend_rows(
    module: torch.nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    step: ForwardPass,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Write the new keys and values, and return [1, N, query heads, D]; registered with transformers under NAME."""
    del attention_mask
    index, config = module.layer_idx, cast("Any", module.config)
    assert isinstance(index, int)
    whole = sliding_window is None or sliding_window >= config.max_position_embeddings
    assert whole, f"its layers see {sliding_window} tokens alone, and every row here is seen whole; use SGLang"
    key_SCHD, value_SCHD = step.kv.layer(index, key_1HND, value_1HND)
    key_SCHD.flatten(0, 1).index_copy_(0, step.write_N, key_1HND[0].transpose(0, 1))
    value_SCHD.flatten(0, 1).index_copy_(0, step.write_N, value_1HND[0].transpose(0, 1))
    parts = []
    if step.num_decoding:
        parts.append(_decode(query_1HND, key_SCHD, value_SCHD, step, scaling))
    for segment in step.segments:
        first, last = segment.first, segment.last
        if segment.past:
            key = key_SCHD[segment.row, : segment.past + last - first].transpose(0, 1).unsqueeze(0)
            value = value_SCHD[segment.row, : segment.past + last - first].transpose(0, 1).unsqueeze(0)
        else:
            key, value = key_1HND[:, :, first:last], value_1HND[:, :, first:last]
        out_1HND = scaled_dot_product_attention(
            query_1HND[:, :, first:last], key, value, attn_mask=segment.mask_NL, is_causal=not segment.past,
            scale=scaling, enable_gqa=True,
        )  # fmt: skip
        parts.append(out_1HND[0].transpose(0, 1))
    out_NHD = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out_NHD.unsqueeze(0), None


def _decode(
    query_1HND: Tensor, key_SCHD: Tensor, value_SCHD: Tensor, step: ForwardPass, scaling: float | None
) -> Tensor:
    """[B, query heads, D]. Query heads that share a key-value head pass as query positions, so no keys are copied."""
    heads, width = key_SCHD.shape[2:]
    num_rows = step.num_decoding
    query_BHGD = query_1HND[0, :, :num_rows].transpose(0, 1).reshape(num_rows, heads, -1, width)
    out_BHGD = scaled_dot_product_attention(
        query_BHGD,
        key_SCHD[:num_rows, : step.short_keys].transpose(1, 2),
        value_SCHD[:num_rows, : step.short_keys].transpose(1, 2),
        attn_mask=step.short_mask_B11L,
        scale=scaling,
    )
    for row, length in step.long_rows:
        out_BHGD[row] = scaled_dot_product_attention(
            query_BHGD[row : row + 1],
            key_SCHD[row : row + 1, :length].transpose(1, 2),
            value_SCHD[row : row + 1, :length].transpose(1, 2),
            scale=scaling,
        )[0]
    return out_BHGD.flatten(1, 2)


AttentionInterface.register(NAME, attend_rows)


class RowModel:
    """The model, and what the engine has to know about it."""

    def __init__(self, path: str, *, in_halves: bool = False) -> None:
        """`in_halves`: a large model's steps of few tokens multiply by weights rounded to float16, and sum in float32.

        Raises PartUnavailable for what is no model, or none that this engine runs.
        """
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            model = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise PartUnavailable(
                f"engine: {path} is not a causal language model that transformers loads ({error}); "
                "give a folder with config.json and *.safetensors"
            ) from error
        self.module: torch.nn.Module = model.eval().requires_grad_(False)
        self.vocab_size = int(config.vocab_size)
        self.context_length_tokens = int(config.max_position_embeddings)
        self.model_type = str(config.model_type)
        self.architectures = list(config.architectures or [])
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._probe = [token % self.vocab_size for token in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)]
        self.eos_token_ids = frozenset(eos_ids(path, config.eos_token_id))
        expected = self._reference_logprobs()
        model.set_attn_implementation(NAME)
        self._check_exact(path, expected)
        large = self.num_parameters >= SMALL_PARAMETERS
        self._in_halves = in_halves and large and torch.backends.quantized.engine in _PACKS_HALVES
        self._pack()

    def forward(
        self, token_ids: Sequence[int], positions: Sequence[int], step: ForwardPass, keep: Sequence[int]
    ) -> Tensor:
        """Return logits [len(keep), V] after the packed tokens at indices `keep`; the rows then hold all tokens."""
        logits: Tensor = self.module(
            input_ids=torch.tensor(token_ids).unsqueeze(0),
            position_ids=torch.tensor(positions).unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, dtype=torch.long),
            step=step,
        ).logits
        return logits[0]

    @torch.inference_mode()
    def _reference_logprobs(self) -> Tensor:
        logits = self.module(input_ids=torch.tensor([self._probe]), use_cache=False, logits_to_keep=2).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    @torch.inference_mode()
    def _check_exact(self, path: str, expected: Tensor) -> None:
        """Refuse a model whose log-probs of ten tokens differ over rows: its attention has windows, sinks or soft caps.

        Ten tokens don't show a longer window, so `attend_rows` refuses any.
        """
        probe = self._probe
        last = len(probe) - 1
        kv = KvRows(num_rows=2, context_length_tokens=self.context_length_tokens)
        try:
            self.forward(probe[:4], range(4), plan_step(kv, [], [(0, 0, 4)]), [3])
            before = self.forward(probe[4:last], range(4, last), plan_step(kv, [], [(0, 4, last - 4)]), [last - 5])
            after = self.forward(probe[last:], [last], plan_step(kv, [last + 1], []), [0])
        except (TypeError, RuntimeError, AttributeError, AssertionError) as error:
            raise PartUnavailable(f"engine: {path} ({self.model_type}) can't run over rows: {error}") from error
        found = torch.log_softmax(torch.cat([before, after]).float(), dim=-1)
        difference = (found - expected).abs().max().item()
        if not difference < _TOLERANCE_NATS:
            raise PartUnavailable(
                f"engine: {path} ({self.model_type}) over rows differs from transformers by {difference:.3g} nats, "
                f"expected less than {_TOLERANCE_NATS}; this engine does not have its kind of attention: use SGLang"
            )

    def apply(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights by these, which are checked; runs between two steps."""
        own = self.module.state_dict()
        for name, tensor in weights.items():
            own[name].copy_(tensor)
        self._pack()

    def _pack(self) -> None:
        for layer in self.module.modules() if self._in_halves else ():
            if isinstance(layer, nn.Linear):
                # In place: the layer keeps its adapters' hook and a weight that it shares with the embedding.
                packed = torch.ops.quantized.linear_prepack_fp16(layer.weight, layer.bias)
                layer.forward = partial(_multiplied, layer, packed)  # type: ignore[method-assign]

    def read_weights(self, path: str) -> dict[str, Tensor]:
        """Return the folder's weights by this model's names; raises UnusableCheckpoint for another model's weights."""
        own = self.module.state_dict()
        tied = set(getattr(self.module, "all_tied_weights_keys", None) or ())
        found: dict[str, Tensor] = {}
        for file in weight_files(Path(path)):
            try:
                found |= load_file(file)
            except (OSError, SafetensorError) as error:
                raise UnusableCheckpoint(
                    f"{file}: {error}; the weights in use stay, write the checkpoint again"
                ) from error
        missing = sorted(own.keys() - found.keys() - tied)
        unknown = sorted(found.keys() - own.keys())
        shapes = [name for name in found.keys() & own.keys() if found[name].shape != own[name].shape]
        if missing or unknown or shapes:
            raise UnusableCheckpoint(
                f"{path}: not a checkpoint of the model served ({len(missing)} weights missing, "
                f"{len(unknown)} unknown, {len(shapes)} of another shape, "
                f"such as {(missing + unknown + shapes)[0]}); the weights in use stay"
            )
        return found


def _multiplied(layer: nn.Linear, packed: Any, input_1NI: Tensor) -> Tensor:
    if input_1NI.shape[-2] > _FEW_TOKENS:
        return linear(input_1NI, layer.weight, layer.bias)
    product_1NO: Tensor = torch.ops.quantized.linear_dynamic_fp16(input_1NI, packed)
    return product_1NO


def eos_ids(path: str, configured: int | list[int] | None) -> set[int]:
    named = [configured]
    if (Path(path) / "generation_config.json").is_file():
        named.append(GenerationConfig.from_pretrained(path).eos_token_id)
    ids: set[int] = set()
    for one in named:
        ids.update(one if isinstance(one, list) else [] if one is None else [one])
    return ids


class _Pair(NamedTuple):
    """An adapter's factors of rank R for a linear layer with I inputs and O outputs; the second includes the scale."""

    down_RI: Tensor
    up_OR: Tensor


class Adapters:
    """The loaded adapters, by name."""

    def __init__(self, model: nn.Module) -> None:
        self._linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self._pairs: dict[str, dict[str, _Pair]] = {}
        self._active: list[tuple[dict[str, _Pair], Tensor]] = []
        self._hooked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._pairs

    def add(self, name: str, pairs: Mapping[str, _Pair]) -> None:
        self._pairs[name] = dict(pairs)
        for layer in pairs.keys() - self._hooked:
            self._linear[layer].register_forward_hook(self._hook(layer))
            self._hooked.add(layer)

    def remove(self, name: str) -> None:
        """Remove the adapter, which no job may still use."""
        del self._pairs[name]

    @contextmanager
    def using(self, names: Sequence[str | None], counts: Sequence[int]) -> Iterator[None]:
        """For the length of the block, `counts[i]` consecutive packed tokens belong to the adapter names[i]."""
        if self._pairs:
            owner = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(counts))
            for name in {name for name in names if name is not None}:
                mine = torch.tensor([one == name for one in names])
                self._active.append((self._pairs[name], mine[owner].nonzero().squeeze(1)))
        try:
            yield
        finally:
            self._active.clear()

    def _hook(self, layer: str) -> Any:
        def add_products(_module: nn.Module, inputs: tuple[Tensor, ...], output_1NO: Tensor) -> Tensor:
            for pairs, index_T in self._active:
                pair = pairs.get(layer)
                if pair is not None:
                    input_TI = inputs[0][0].index_select(0, index_T)
                    output_1NO[0].index_add_(0, index_T, (input_TI @ pair.down_RI.T) @ pair.up_OR.T)
            return output_1NO

        return add_products

    def read(self, path: str) -> dict[str, _Pair]:
        """The factors in a peft folder; raises UnusableCheckpoint where they do not fit the model served."""
        folder = Path(path)
        try:
            config = json.loads((folder / "adapter_config.json").read_text())
            tensors = load_file(folder / "adapter_model.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise UnusableCheckpoint(
                f"adapter {path} can't be read ({error}); "
                "give a folder with adapter_config.json and adapter_model.safetensors"
            ) from error
        if config.get("use_dora") or config.get("bias", "none") != "none" or config.get("alpha_pattern"):
            raise UnusableCheckpoint(
                f"adapter {path} uses DoRA, biases or alpha_pattern; this engine has plain LoRA only"
            )
        return {layer: self._pair(path, layer, tensors, config) for layer in self._layers(path, tensors)}

    def _layers(self, path: str, tensors: Mapping[str, Tensor]) -> set[str]:
        layers = set()
        for name in tensors:
            layer, _, factor = name.removeprefix(_PREFIX).rpartition(".lora_")
            # The output layer sees only the tokens whose logits are wanted, not all packed ones.
            if factor not in ("A.weight", "B.weight") or layer not in self._linear or layer == "lm_head":
                raise UnusableCheckpoint(f"adapter {path}: {name} names no inner linear layer of the model served")
            layers.add(layer)
        return layers

    def _pair(self, path: str, layer: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> _Pair:
        base = self._linear[layer]
        down, up = (tensors.get(f"{_PREFIX}{layer}.lora_{factor}.weight") for factor in "AB")
        if down is None or up is None or (down.shape[1], up.shape[0]) != (base.in_features, base.out_features):
            raise UnusableCheckpoint(
                f"adapter {path}: {layer} needs both factors, "
                f"for {base.in_features} inputs and {base.out_features} outputs"
            )
        rank = down.shape[0]
        scale = float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)
        dtype = base.weight.dtype
        return _Pair(down.to(dtype), (up.float() * scale).to(dtype))
