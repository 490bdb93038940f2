"""A Hugging Face causal model as training needs it: log-probs of answers, its weights at other times, files on disk.

All log-probs are computed here, by one function, whoever's weights are asked: two of them may be subtracted without
comparing two implementations. B rows, T response tokens, N response tokens of all rows, K tokens looked at after each
of them, V the vocabulary, H hidden width.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from clawstream.errors import ConfigError, UnusableCheckpoint
from clawstream.inference.model_folder import tensor_headers
from clawstream.training.answers import Answers, Suffix
from clawstream.training.microbatches import micro_batches
from clawstream.training.trainable import ModelLimits

ENTROPY_ROWS = 512
HEAD_TOKENS = 4096  # logits exist for so many tokens at once; a longer piece computes them again in the backward pass
NOT_COPIED = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".md"})  # weights, words

_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}

Weights = Mapping[str, Tensor]
T = TypeVar("T")


class Top(NamedTuple):
    """The tokens that a model finds likeliest after each token of an answer."""

    ids_TK: Tensor
    logp_TK: Tensor


class Look(NamedTuple):
    """What a model says at each place of answers, NaN past each row's end."""

    logp_BT: Tensor  # of the response's tokens
    entropy_BT: Tensor  # nats; without gradient
    among_BTK: Tensor  # log-probs of the tokens that were asked about


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
        self.published_dtype = torch.float32 if adapter is not None else _dtype_of(folder)

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

    @property
    def rounds(self) -> bool:
        """Whether what is published is less exact than what is trained."""
        return self.published_dtype != torch.float32

    def published(self) -> dict[str, Tensor]:
        """Return the trained weights as `save` writes them for engines, in the machine's own memory."""
        return {name: p.detach().to("cpu", self.published_dtype, copy=True) for name, p in self.trained.items()}

    def changed_share(self, before: Weights) -> float:
        """Return which share of the published numbers is not as it was `before`."""
        changed = sum(
            int((p.detach().to("cpu", self.published_dtype) != before[name]).sum()) for name, p in self.trained.items()
        )
        return changed / sum(p.numel() for p in self.trained.values())

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
        answers = Answers(suffixes, self.device)
        logp_N1, _ = self._under_head(answers, answers.target_N.unsqueeze(1), entropy=False)
        return answers.rows(logp_N1.squeeze(1))

    def look(self, suffixes: Sequence[Suffix], among: Sequence[Tensor] | None = None) -> Look:
        """Return the same, and more of each place; `among` [T, K] names tokens to score beside those of each row."""
        answers = Answers(suffixes, self.device)
        ids_NE = answers.target_N.unsqueeze(1)
        if among is not None:
            ids_NE = torch.cat([ids_NE, torch.cat([ids_TK.to(self.device) for ids_TK in among])], 1)
        logp_NE, entropy_N = self._under_head(answers, ids_NE, entropy=True)
        return Look(answers.rows(logp_NE[:, 0]), answers.rows(entropy_N), answers.rows(logp_NE[:, 1:]))

    @torch.no_grad()
    def score(self, suffixes: Sequence[Suffix], *, weights: Weights | None, budget_tokens: int) -> list[Tensor]:
        """Return the log-probs [T] of each response under the given weights (None: the current ones), in order."""

        def scored(group: list[Suffix]) -> list[Tensor]:
            logp_BT = self.logprobs(group)
            return [logp_BT[row, : len(s.response_ids)].clone() for row, s in enumerate(group)]

        with self.holding(weights):
            return _in_groups(suffixes, scored, budget_tokens)

    @torch.no_grad()
    def likeliest(
        self, suffixes: Sequence[Suffix], *, num_tokens: int, weights: Weights | None, budget_tokens: int
    ) -> list[Top]:
        """Return the `num_tokens` tokens that the given weights find likeliest at each place of each response."""

        def scored(group: list[Suffix]) -> list[Top]:
            answers = Answers(group, self.device)
            hidden_NH = self._before_head(answers)
            tops = [self._likeliest(hidden_NH[at], answers.scale_N[at], num_tokens) for at in _pieces(len(hidden_NH))]
            ids, logps = (answers.each(torch.cat(parts)) for parts in zip(*tops, strict=True))
            return [Top(*both) for both in zip(ids, logps, strict=True)]

        with self.holding(weights):
            return _in_groups(suffixes, scored, budget_tokens)

    def save(self, folder: Path) -> None:
        """Write what an engine loads: the model as exact as its base, with its tokenizer, or the adapter."""
        if self._adapter is not None:
            self._adapter.save_pretrained(folder)
            return
        with self._rounded():
            self._core.save_pretrained(folder)
        for file in sorted(self.folder.iterdir()):
            if file.is_file() and file.suffix not in NOT_COPIED and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)

    def restore(self, folder: Path, masters: Path | None = None) -> None:
        """Take over the weights that `save` wrote, or the more exact ones that it was written from."""
        found: Mapping[str, Tensor | None]
        if masters is not None:
            found = load_file(masters)
        elif self._adapter is not None:
            saved = load_file(folder / "adapter_model.safetensors")
            found = {name: saved.get(_saved_name(name)) for name in self.trained}
        else:
            parameters = dict(_core(folder, str(self.device)).named_parameters())
            found = {name: parameters.get(name) for name in self.trained}
        for name, parameter in self.trained.items():
            value = found.get(name)
            if value is None or value.shape != parameter.shape:
                raise UnusableCheckpoint(
                    f"{folder}: {name} is {'missing' if value is None else tuple(value.shape)}, expected "
                    f"{tuple(parameter.shape)} as in {self.folder}. Nothing is trained. Name the base model, and the "
                    "LoRA rank, that this policy was started with."
                )
            parameter.data.copy_(value.detach())

    @contextmanager
    def _rounded(self) -> Iterator[None]:
        """Have all weights as the base has them; what is saved says so of itself."""
        exact = [(p, p.data) for p in self._core.parameters()]
        try:
            for parameter, data in exact:
                parameter.data = data.to(self.published_dtype)
            yield
        finally:
            for parameter, data in exact:
                parameter.data = data

    def _before_head(self, answers: Answers) -> Tensor:
        # No mask: padding stands to the right of everything that is read, where a causal model can't see it.
        output = self._core.get_decoder()(input_ids=answers.ids_BL, use_cache=False)
        return answers.before(output.last_hidden_state)

    def _under_head(self, answers: Answers, ids_NE: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the ids at each place, and the entropies [N]; without `entropy` those are empty."""
        hidden_NH = self._before_head(answers)
        pieces = [(hidden_NH[at], answers.scale_N[at], ids_NE[at], entropy) for at in _pieces(len(hidden_NH))]
        if len(pieces) == 1:
            return self._head_piece(*pieces[0])
        parts = [checkpoint(self._head_piece, *piece, use_reentrant=False) for piece in pieces]
        logps, entropies = zip(*parts, strict=True)
        return torch.cat(logps), torch.cat(entropies)

    def _head_piece(self, hidden_NH: Tensor, scale_N: Tensor, ids_NE: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        logits_NV = self._logits(hidden_NH, scale_N)
        logp_NE = logits_NV.gather(1, ids_NE) - logits_NV.logsumexp(1, keepdim=True)
        return logp_NE, _entropies(logits_NV.detach()) if entropy else logits_NV.new_empty(0)

    def _likeliest(self, hidden_NH: Tensor, scale_N: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        logits_NV = self._logits(hidden_NH, scale_N)
        found = logits_NV.topk(num_tokens)
        return found.indices, found.values - logits_NV.logsumexp(1, keepdim=True)

    def _logits(self, hidden_NH: Tensor, scale_N: Tensor) -> Tensor:
        logits_NV: Tensor = self._core.get_output_embeddings()(hidden_NH).float() / scale_N.unsqueeze(1)
        return logits_NV

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


def _dtype_of(folder: Path) -> torch.dtype:
    """Return what all of the base's weights are stored as; float32 where they differ, or can't be seen."""
    stored = {header.dtype for header in (tensor_headers(folder) or {}).values()}
    return _HALVES.get(stored.pop(), torch.float32) if len(stored) == 1 else torch.float32


def _entropies(logits_NV: Tensor) -> Tensor:
    """Return the entropy [N] of each row, with little more memory than the rows have."""
    parts = torch.split(logits_NV, ENTROPY_ROWS)
    return torch.cat([torch.special.entr(logits_MV.softmax(1)).sum(1) for logits_MV in parts])


def _stretched(config: Any, positions: int | None) -> int | None:
    """Return the context in tokens as engines have it: what rotary embeddings were stretched to counts."""
    scaling = getattr(config, "rope_scaling", None) or {}
    if positions is None or "original_max_position_embeddings" in scaling:
        return positions
    return int(positions * (scaling.get("factor") or 1))


def _pieces(num_tokens: int) -> list[slice]:
    return [slice(start, start + HEAD_TOKENS) for start in range(0, num_tokens, HEAD_TOKENS)]


def _in_groups(
    suffixes: Sequence[Suffix], scored: Callable[[list[Suffix]], Sequence[T]], budget_tokens: int
) -> list[T]:
    """Return what `scored` says of each suffix, in order; it is given as many at once as fit."""
    found: dict[int, T] = {}
    for group in micro_batches([s.num_tokens for s in suffixes], budget_tokens=budget_tokens):
        found |= zip(group, scored([suffixes[i] for i in group]), strict=True)
    return [found[i] for i in range(len(suffixes))]


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
