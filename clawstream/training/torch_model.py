"""A Hugging Face causal model as training needs it: log-probs of answers, its weights at other times, files on disk.

All log-probs are computed here, by one function, whoever's weights are asked: two of them may be subtracted without
comparing two implementations. B rows, L input tokens, T response tokens, N response tokens of all rows, H hidden width.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from clawstream.errors import ConfigError, UnusableCheckpoint
from clawstream.training.microbatches import micro_batches
from clawstream.training.trainable import ModelLimits

GREEDY_BELOW = 1e-6  # as engines have it: the most likely token is sampled, and logits are not divided
HEAD_TOKENS = 4096  # logits exist for so many tokens at once; a longer piece computes them again in the backward pass
NOT_COPIED = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".md"})  # weights, words

Weights = Mapping[str, Tensor]


class Suffix(NamedTuple):
    """An answer to score, after what it answered."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    temperature: float  # below GREEDY_BELOW it is scored as 1: engines report it so

    @property
    def num_tokens(self) -> int:
        """Prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


class TorchModel:
    """A causal model in float32, all its weights trained or those of a LoRA adapter.

    It stays in evaluation mode, so that the weights being trained and the weights just before the step agree exactly.
    """

    def __init__(self, folder: Path, core: Any, adapter: Any | None) -> None:
        self.folder = folder  # of the base
        self._core = core
        self._adapter = adapter
        self.trained: dict[str, nn.Parameter] = {n: p for n, p in core.named_parameters() if p.requires_grad}
        self.device: torch.device = next(core.parameters()).device

    @classmethod
    def load(cls, folder: Path, *, lora_rank: int | None = None, device: str = "cpu", seed: int = 0) -> "TorchModel":
        """Return the model of a Hugging Face folder; with a rank, frozen under an adapter that adds nothing yet."""
        core = _core(folder, device)
        adapter = None
        if lora_rank is not None:
            torch.manual_seed(seed)
            adapter = get_peft_model(core, _lora(lora_rank)).eval()
        model = cls(folder, core, adapter)
        model._check_head()
        return model

    def copy(self) -> dict[str, Tensor]:
        """Return the trained weights as they are now; of a model just loaded, those of the reference."""
        return {name: p.detach().clone() for name, p in self.trained.items()}

    @contextmanager
    def holding(self, weights: Weights | None) -> Iterator[None]:
        """Compute with these weights instead of the current ones, which come back unchanged; None: the current ones."""
        if weights is None:
            yield
            return
        current = {name: p.data for name, p in self.trained.items()}
        try:
            for name, parameter in self.trained.items():
                parameter.data = weights[name]
            yield
        finally:
            for name, parameter in self.trained.items():
                parameter.data = current[name]

    def logprobs(self, suffixes: Sequence[Suffix]) -> Tensor:
        """Return log-probs [B, T] of the responses, NaN past each one's end; rows are padded on the right.

        Logits are computed for response tokens only: the prompt's cost the most and nobody reads them.
        """
        assert all(s.prompt_ids and s.response_ids for s in suffixes), "a suffix needs tokens before it and in it"
        width = max(s.num_tokens for s in suffixes) - 1  # nothing is read after the last response token
        ids_BL = torch.zeros((len(suffixes), width), dtype=torch.long)
        for row, s in enumerate(suffixes):
            tokens = [*s.prompt_ids, *s.response_ids[:-1]]
            ids_BL[row, : len(tokens)] = torch.tensor(tokens)
        # No mask: padding stands to the right of everything that is read, where a causal model can't see it.
        hidden_BLH = self._core.get_decoder()(input_ids=ids_BL.to(self.device), use_cache=False).last_hidden_state

        row_N = [row for row, s in enumerate(suffixes) for _ in s.response_ids]
        token_N = [t for s in suffixes for t in range(len(s.response_ids))]
        column_N = [len(suffixes[row].prompt_ids) - 1 + t for row, t in zip(row_N, token_N, strict=True)]
        target_N = torch.tensor([i for s in suffixes for i in s.response_ids], device=self.device)
        scale_N = torch.tensor([_scale(suffixes[row].temperature) for row in row_N], device=self.device)
        logp_N = self._head_logprobs(hidden_BLH[row_N, column_N], target_N, scale_N)
        longest = max(len(s.response_ids) for s in suffixes)
        empty_BT = logp_N.new_full((len(suffixes), longest), torch.nan)
        where = (torch.tensor(row_N, device=self.device), torch.tensor(token_N, device=self.device))
        return empty_BT.index_put(where, logp_N)

    @torch.no_grad()
    def score(self, suffixes: Sequence[Suffix], *, weights: Weights | None, budget_tokens: int) -> list[Tensor]:
        """Return the log-probs [T] of each response under the given weights (None: the current ones), in order."""
        scores: dict[int, Tensor] = {}
        with self.holding(weights):
            for group in micro_batches([s.num_tokens for s in suffixes], budget_tokens=budget_tokens):
                logp_BT = self.logprobs([suffixes[i] for i in group])
                for row, index in enumerate(group):
                    scores[index] = logp_BT[row, : len(suffixes[index].response_ids)].clone()
        return [scores[i] for i in range(len(suffixes))]

    def save(self, folder: Path) -> None:
        """Write what an engine loads: the model with its tokenizer, or the adapter."""
        if self._adapter is not None:
            self._adapter.save_pretrained(folder)
            return
        self._core.save_pretrained(folder)
        for file in sorted(self.folder.iterdir()):
            if file.is_file() and file.suffix not in NOT_COPIED and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)

    def restore(self, folder: Path) -> None:
        """Take over the weights that `save` wrote."""
        if self._adapter is not None:
            saved = load_file(folder / "adapter_model.safetensors")
            found = {name: saved.get(_saved_name(name)) for name in self.trained}
        else:
            parameters = dict(_core(folder, str(self.device)).named_parameters())
            found = {name: parameters.get(name) for name in self.trained}
        for name, parameter in self.trained.items():
            value = found[name]
            if value is None or value.shape != parameter.shape:
                raise UnusableCheckpoint(
                    f"{folder}: {name} is {'missing' if value is None else tuple(value.shape)}, expected "
                    f"{tuple(parameter.shape)} as in {self.folder}. Nothing is trained. Name the base model, and the "
                    "LoRA rank, that this policy was started with."
                )
            parameter.data.copy_(value.detach())

    def _head_logprobs(self, hidden_NH: Tensor, target_N: Tensor, scale_N: Tensor) -> Tensor:
        if len(hidden_NH) <= HEAD_TOKENS:
            return self._head_piece(hidden_NH, target_N, scale_N)
        bounds = [slice(start, start + HEAD_TOKENS) for start in range(0, len(hidden_NH), HEAD_TOKENS)]
        pieces = [(hidden_NH[b], target_N[b], scale_N[b]) for b in bounds]
        return torch.cat([checkpoint(self._head_piece, *piece, use_reentrant=False) for piece in pieces])

    def _head_piece(self, hidden_NH: Tensor, target_N: Tensor, scale_N: Tensor) -> Tensor:
        logits_NV: Tensor = self._core.get_output_embeddings()(hidden_NH).float() / scale_N.unsqueeze(1)
        return logits_NV.gather(1, target_N.unsqueeze(1)).squeeze(1) - logits_NV.logsumexp(1)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuse a family whose logits are not just its head on its last hidden state (soft caps, scales)."""
        ids_1L = torch.arange(4, device=self.device).unsqueeze(0)
        whole = self._core(input_ids=ids_1L, use_cache=False).logits.float().log_softmax(-1)
        expected = whole[0, [0, 1, 2], [1, 2, 3]]
        found = self.logprobs([Suffix([0], [1, 2, 3], 1.0)])[0]
        if not torch.allclose(found, expected, atol=1e-3):
            raise ConfigError(
                f"{self.folder}: {type(self._core).__name__} does more to its logits than its head: log-probs differ "
                f"by {float((found - expected).abs().max()):.3g} nats. Nothing is trained. Use a model without logit "
                "caps or scales."
            )


def limits_of(folder: Path) -> ModelLimits:
    """Return what the model in the folder can take, by its configuration; raises UnusableCheckpoint."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as error:
        raise _unloadable(folder, error) from error
    positions = getattr(config, "max_position_embeddings", None)
    return ModelLimits(vocabulary_tokens=config.vocab_size, context_tokens=_stretched(config, positions))


def _stretched(config: Any, positions: int | None) -> int | None:
    """Return the context in tokens as engines have it: what rotary embeddings were stretched to counts."""
    scaling = getattr(config, "rope_scaling", None) or {}
    if positions is None or "original_max_position_embeddings" in scaling:
        return positions
    return int(positions * (scaling.get("factor") or 1))


def _scale(temperature: float) -> float:
    return 1.0 if temperature < GREEDY_BELOW else temperature


def _unloadable(folder: Path, error: Exception) -> UnusableCheckpoint:
    return UnusableCheckpoint(
        f"{folder}: no causal model that transformers can load: {error}. Nothing is trained. Name a Hugging Face "
        "folder with config.json and safetensors."
    )


def _core(folder: Path, device: str) -> Any:
    transformers_logging.disable_progress_bar()
    try:
        core, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _unloadable(folder, error) from error
    if info["missing_keys"]:
        raise UnusableCheckpoint(
            f"{folder}: {len(info['missing_keys'])} weights are missing, among them {min(info['missing_keys'])}. "
            "Nothing is trained. Fetch the folder again."
        )
    return core.to(device).eval()


def _lora(rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def _saved_name(name: str) -> str:
    return "base_model.model." + name.replace(".default.", ".")
