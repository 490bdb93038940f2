"""Megatron-Core's GPTModel with parts that compute what transformers computes, on any device.

Megatron's own attention asks for CUDA kernels or builds a mask of L x L, and its norm can't be cut by token. L tokens,
B rows, N heads, D their width, H the model's width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.nn import functional

from clawstream.training.gating import PiecewiseCache
from clawstream.training.megatron.shape import Shape, Sizes


class ColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A matrix that is cut by row, multiplied in the configuration's `autocast_dtype`; so is its gradient.

    Torch's autocast is off: with it Megatron's backward pass would exchange gradients in the uncast type.
    """

    def _forward_impl(self, input: Tensor, weight: Tensor, **given: Any) -> Tensor:  # noqa: A002  # its name there
        dtype = self.config.autocast_dtype
        product: Tensor = super()._forward_impl(input=input.to(dtype), weight=weight.to(dtype), **given)
        return product


class RowLinear(RowParallelLinear):  # type: ignore[misc]
    """A matrix that is cut by column, multiplied as `ColumnLinear` is; its parts are summed in float32.

    Megatron casts the residual stream to the precision of the values that are added to it.
    """

    def _forward_impl(self, input: Tensor, weight: Tensor, **given: Any) -> Tensor:  # noqa: A002  # its name there
        dtype = self.config.autocast_dtype
        product: Tensor = super()._forward_impl(input=input.to(dtype), weight=weight.to(dtype), **given)
        return product.float()


class Norm(nn.Module):
    """RMSNorm in float32, whose gradient is summed over processes that hold other tokens of the same rows."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the input normalised along the last axis."""
        exact = hidden.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self._epsilon)
        return self.weight * exact.to(hidden.dtype)


class Exact(nn.Module):
    """Stands in for a head's norm to make heads float32: Megatron rotates them in the precision they have."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, heads: Tensor) -> Tensor:
        """Return the heads in float32."""
        return heads.float()


class Attention(nn.Module):
    """Causal attention by torch, through a window where the layer has one."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.reading: PiecewiseCache | None = None
        self._window = window

    def forward(
        self, query_LBND: Tensor, key_LBND: Tensor, value_LBND: Tensor, mask: Tensor | None, **_: Any
    ) -> Tensor:
        """Return [L, B, N * D]. Outside of `read_by`, padding is on the right, where no token of the row sees it."""
        assert mask is None, "what a token may see follows from its place"
        parts = (part.to(value_LBND.dtype).permute(1, 2, 0, 3) for part in (query_LBND, key_LBND, value_LBND))
        query_BNLD, key_BNLD, value_BNLD = parts
        length = query_BNLD.shape[2]
        seen = None  # [L, L], or [B or 1, 1, L, all that was read]
        if self.reading is not None:
            key_BNLD, value_BNLD = self.reading.so_far(self, key_BNLD, value_BNLD)
            seen = self.reading.seen(length, self._window)
        elif self._window is not None and self._window < length:
            seen = torch.ones(length, length, dtype=torch.bool, device=query_BNLD.device).tril()
            seen = seen.triu(1 - self._window)
        out_BNLD = functional.scaled_dot_product_attention(
            query_BNLD, key_BNLD, value_BNLD,
            attn_mask=seen, is_causal=seen is None, enable_gqa=query_BNLD.shape[1] != key_BNLD.shape[1],
        )  # fmt: skip
        return out_BNLD.permute(2, 0, 1, 3).flatten(2).contiguous()


class Rotary(nn.Module):
    """Rotary angles from given frequencies, in place of Megatron's own."""

    def __init__(self, frequency_D: Tensor, tensor: int) -> None:
        super().__init__()
        self.reading: PiecewiseCache | None = None
        self.register_buffer("_frequency_D", frequency_D, persistent=False)
        self._tensor = tensor

    def get_rotary_seq_len(self, _context: Any, decoder: Any, arrived: Any, config: Any, *_: Any) -> int:
        """Return how many tokens a row has; this process may hold only a part of them."""
        hidden: Tensor = decoder.input_tensor if decoder.input_tensor is not None else arrived
        return int(hidden.shape[0]) * (self._tensor if config.sequence_parallel else 1)

    def forward(self, length: int, **_: Any) -> Tensor:
        """Return the angles [L, 1, 1, D]; places count padding too, as attention sees only differences of angles."""
        frequency_D = self._frequency_D
        assert isinstance(frequency_D, Tensor)
        start = 0 if self.reading is None else self.reading.num_read
        places_L = torch.arange(start, start + length, device=frequency_D.device, dtype=torch.float32)
        angles_LD = torch.outer(places_L, frequency_D)
        return torch.cat([angles_LD, angles_LD], 1)[:, None, None, :]


@contextmanager
def read_by(stage: nn.Module, reading: PiecewiseCache) -> Iterator[None]:
    """Have the stage read rows piece by piece in the block, with `reading` as its cache."""
    parts = [part for part in stage.modules() if isinstance(part, (Attention, Rotary))]
    try:
        for part in parts:
            part.reading = reading
        yield
    finally:
        for part in parts:
            part.reading = None


class Gpt(GPTModel):  # type: ignore[misc]
    """Megatron's model up to the head's input; the head is applied elsewhere, to answers' tokens alone."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def gpt(
    shape: Shape, sizes: Sizes, frequency_D: Tensor, *, first: bool, last: bool, dtype: torch.dtype
) -> Gpt:  # fmt: skip
    """Return a stage of the model without weights; its process groups are Megatron's current ones.

    The layers' matrices are multiplied in `dtype`; weights, and the states between layers, are float32.
    """
    initialize_rng_tracker(inference_rng_tracker=True)  # without dropout no process draws a random number
    model = Gpt(
        config=_config(shape, sizes, dtype),
        transformer_layer_spec=_block(shape, sizes),
        vocab_size=shape.padded_vocabulary(sizes.tensor),
        max_sequence_length=shape.context,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="none",
    )
    # Megatron's own rotary embedding takes no frequencies, only `rotary_base`, and moves itself to a GPU.
    model.position_embedding_type = "rope"
    model.rotary_pos_emb = Rotary(frequency_D, sizes.tensor)
    return model


def _config(shape: Shape, sizes: Sizes, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.width,
        ffn_hidden_size=shape.inner_width,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_groups,
        kv_channels=shape.head_width,
        layernorm_epsilon=shape.norm_epsilon,
        normalization="RMSNorm",
        qk_layernorm=shape.head_norms,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
        perform_initialization=False,  # weights are read right after
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        autocast_dtype=dtype,  # read by ColumnLinear, RowLinear and adapters alone
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        sequence_parallel=sizes.by_sequence,
        variable_seq_lengths=True,
        calculate_per_token_loss=True,  # losses are summed, and divided once the whole batch is counted
        batch_p2p_comm=False,
        moe_token_dispatcher_type="alltoall",  # noqa: S106  # no experts here; the default refuses variable lengths
    )


def _block(shape: Shape, sizes: Sizes) -> TransformerBlockSubmodules:
    head_norm = Norm if shape.head_norms else Exact
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnLinear,
                    core_attention=_Windowed(shape.windows),
                    linear_proj=RowLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * (shape.num_layers // sizes.pipeline), layer_norm=Norm)


class _Windowed:
    """Makes each layer's attention, with the layer's window."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self._windows = windows

    def __call__(self, *, layer_number: int, **_: Any) -> Attention:
        return Attention(self._windows[layer_number - 1])  # Megatron counts from 1, over all stages
