"""A causal language model from a folder, run over packed rows, with weights that can be replaced in place.

A folder is taken whole or not at all: every name and shape is checked before the first weight changes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from clawstream.errors import PartUnavailable, UnusableCheckpoint
from clawstream.inference.models.model_folder import weight_files
from clawstream.local.engine import attention
from clawstream.local.engine.attention import ForwardPass, plan_step
from clawstream.local.engine.kv import KvRows

_TOLERANCE_NATS = 1e-2


class RowModel:
    """The model, and what the engine has to know about it."""

    def __init__(self, path: str, *, dtype: torch.dtype = torch.float32) -> None:
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            model = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise PartUnavailable(
                f"engine: {path} is not a causal language model that transformers loads ({error}); "
                "give a folder with config.json and *.safetensors"
            ) from error
        self._model: torch.nn.Module = model.eval().requires_grad_(False)
        self.vocab_size = int(config.vocab_size)
        self.context_length_tokens = int(config.max_position_embeddings)
        self.model_type = str(config.model_type)
        self.architectures = list(config.architectures or [])
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.eos_token_ids = frozenset(_eos_ids(path, config.eos_token_id))
        expected = self._reference_logprobs()
        model.set_attn_implementation(attention.NAME)
        self._check_exact(path, expected)

    @property
    def module(self) -> torch.nn.Module:
        """The transformers model, for adapters."""
        return self._model

    def forward(
        self, token_ids: Sequence[int], positions: Sequence[int], step: ForwardPass, keep: Sequence[int]
    ) -> Tensor:
        """Return logits [len(keep), V] after the packed tokens at indices `keep`; the rows then hold all tokens."""
        logits: Tensor = self._model(
            input_ids=torch.tensor(token_ids).unsqueeze(0),
            position_ids=torch.tensor(positions).unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, dtype=torch.long),
            step=step,
        ).logits
        return logits[0]

    def _probe(self) -> list[int]:
        return [token % self.vocab_size for token in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)]

    @torch.inference_mode()
    def _reference_logprobs(self) -> Tensor:
        logits = self._model(input_ids=torch.tensor([self._probe()]), use_cache=False, logits_to_keep=2).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    @torch.inference_mode()
    def _check_exact(self, path: str, expected: Tensor) -> None:
        """Refuse a model whose attention (sliding windows, sinks, soft caps) these rows would compute wrongly."""
        probe = self._probe()
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
        """Put the checked weights in place; runs between two steps."""
        own = self._model.state_dict()
        for name, tensor in weights.items():
            own[name].copy_(tensor)

    def read_weights(self, path: str) -> dict[str, Tensor]:
        """Return the folder's weights by this model's names; raises UnusableCheckpoint for another model's weights."""
        own = self._model.state_dict()
        tied = set(getattr(self._model, "all_tied_weights_keys", None) or ())
        found: dict[str, Tensor] = {}
        for file in weight_files(Path(path)):
            try:
                with safe_open(file, framework="pt") as tensors:
                    found.update({name: tensors.get_tensor(name) for name in tensors.keys()})  # noqa: SIM118
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


def _eos_ids(path: str, configured: int | list[int] | None) -> set[int]:
    named = [configured]
    if (Path(path) / "generation_config.json").is_file():
        named.append(GenerationConfig.from_pretrained(path).eos_token_id)
    ids: set[int] = set()
    for one in named:
        ids.update(one if isinstance(one, list) else [] if one is None else [one])
    return ids
