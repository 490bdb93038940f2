"""A causal model cut over processes, as a trainer needs it.

Every process of a copy of the model gets the same samples; each copy computes its share of a batch. A pipeline's last
stage computes the answers' log-probs, and outside of a step sends them to the other stages. L tokens, B rows, N
response tokens, V the vocabulary rows of this process, H the model's width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from peft import PeftModel
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from clawstream.errors import UnusableCheckpoint
from clawstream.training.base_folder import (
    STEM,
    compute_again,
    copy_words,
    saved_name,
    stored,
    stored_dtype,
    unread,
    with_adapter,
    write_parts,
)
from clawstream.training.gating import PiecewiseCache
from clawstream.training.megatron import reducing
from clawstream.training.megatron.layers import gpt, read_by
from clawstream.training.megatron.reducing import clip, part, reduce_gradients, run, spread
from clawstream.training.megatron.shape import Shape, Sizes, configuration, frequencies, refuse_uneven, shape_of
from clawstream.training.megatron.weights import (
    Folder,
    ParameterSource,
    adapt,
    collected,
    held,
    sources,
)
from clawstream.training.model import (
    AnswerTensors,
    Read,
    ScoreGroup,
    SharedModel,
    Weights,
)
from clawstream.training.step.losses import Answers, Suffix
from clawstream.training.step.packing import shares


def join(sizes: Sizes) -> None:
    """Make Megatron's process groups from torch.distributed's processes; earlier groups are removed."""
    for group in parallel_state._global_process_group_list or ():  # noqa: SLF001  # it forgets its groups; their threads stay
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(sizes.tensor, sizes.pipeline, create_gloo_process_groups=False)


class MegatronModel(SharedModel):
    """This process' part of a model: some of its layers, and some rows or columns of their matrices."""

    def __init__(self, folder: Path, stage: Any, shape: Shape, sizes: Sizes, device: torch.device) -> None:
        self.folder = folder
        self.device = device
        self.published_dtype = stored_dtype(folder)
        self._shape, self._sizes, self._stage = shape, sizes, stage
        self._tensor = parallel_state.get_tensor_model_parallel_group()
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()
        self._data = parallel_state.get_data_parallel_group()
        self._last = self._pipeline.rank() == self._pipeline.size() - 1
        self._rows = reducing.VocabularyRows.of(self._tensor, shape.vocabulary)
        self._places = sources(shape, sizes, self._pipeline.rank())
        self._adapter: PeftModel | None = None  # the adapter's configuration; its weights are in `trained`
        self.trained = dict(stage.named_parameters())
        assert self.trained.keys() == self._places.keys(), self.trained.keys() ^ self._places.keys()

    @classmethod
    def load(
        cls, folder: Path, sizes: Sizes, *, lora_rank: int | None = None, device: str = "cpu", seed: int = 0,
        dtype: torch.dtype = torch.float32, recompute_layers: bool = False,
    ) -> "MegatronModel":  # fmt: skip
        """Return this process' part of the model of a Hugging Face folder; with a rank, frozen under an adapter that
        adds nothing yet. Megatron's process groups exist already.

        Matrices but the head's are multiplied in `dtype`. With `recompute_layers` the backward pass computes each layer
        again instead of keeping what is inside it.
        """
        config = configuration(folder)
        shape = shape_of(folder, config)
        refuse_uneven(folder, shape, sizes)
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        stage = gpt(
            shape, sizes, frequencies(folder, config),
            first=pipeline.rank() == 0, last=pipeline.rank() == pipeline.size() - 1, dtype=dtype,
        )  # fmt: skip
        if recompute_layers:
            compute_again(stage.decoder.layers)
        model = cls(folder, stage.to(device).eval(), shape, sizes, torch.device(device))
        model._take(Folder(folder))
        if lora_rank is not None:
            # As TorchModel begins: peft draws random numbers where the weights lie, here in main memory.
            model._adapt(with_adapter(unread(folder), lora_rank, seed))
        return model

    @cached_property
    def moved(self) -> Mapping[str, nn.Parameter]:
        """Return the tensors that this process' optimizer moves: this copy's part of each trained weight."""
        return {name: nn.Parameter(part(p.data, self._data)) for name, p in self.trained.items()}

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Give each copy the gradients of the parts that it moves; after the block every copy has all moved weights."""
        for name, parameter in self.trained.items():
            assert parameter.grad is not None, "they were summed over all processes"
            self.moved[name].grad = part(parameter.grad.contiguous(), self._data)
        yield
        for name, parameter in self.trained.items():
            self.moved[name].grad = None
            spread(parameter.data, self._data)

    @contextmanager
    def reading(self, mask_BL: Tensor) -> Iterator[Read]:
        reading = PiecewiseCache(mask_BL)

        def read(ids_BL: Tensor) -> Tensor:
            last_BV = torch.empty((len(ids_BL), self._shape.vocabulary), device=self.device)

            def step(_: Sequence[int]) -> Tensor:
                hidden_LBH = self._hidden(ids_BL)
                if not self._last:
                    return hidden_LBH
                if self._sizes.by_sequence:
                    hidden_LBH = gather_from_sequence_parallel_region(hidden_LBH, group=self._tensor)
                mine_BV = functional.linear(hidden_LBH[ids_BL.shape[1] - 1], self._head).float()
                last_BV.copy_(reducing.whole(mine_BV, self._rows, self._shape.vocabulary))
                return torch.zeros((), device=self.device)

            with reading.piece(ids_BL.shape[1]):
                run(self._stage, [range(len(ids_BL))], step, forward_only=True)
            self._broadcast(last_BV)
            return last_BV

        with read_by(self._stage, reading):
            yield read

    def share(self, lengths_tokens: Sequence[int]) -> list[int]:
        """Return which samples this copy of the model computes."""
        return shares(lengths_tokens, self._data.size())[self._data.rank()]

    def accumulate(
        self, groups: Sequence[Sequence[int]], suffixes: Sequence[Suffix], total_of: Callable[[Sequence[int]], Tensor]
    ) -> None:
        def step(group: Sequence[int]) -> Tensor:
            return total_of(group) if self._last else self._passed_on([suffixes[i] for i in group])

        run(self._stage, groups, step, forward_only=False)
        reduce_gradients(self._stage, self._shape, self._sizes)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over the copies of the model, each of which knows it on its last stage."""
        counts = self._last and self._tensor.rank() == 0
        return self._totals(values if counts else [0.0] * len(values))

    def clip(self, max_norm: float) -> float:
        group = parallel_state.get_model_parallel_group()
        return clip([(p, self._counts(name)) for name, p in self.trained.items()], max_norm, group)

    def save(self, folder: Path) -> None:
        if self._adapter is not None:
            self._save_adapter(self._adapter, folder)
            return
        rounded = {name: p.detach().to(self.published_dtype) for name, p in self.trained.items()}
        self.save_state(folder, "model", {"": rounded})
        if self.leads:
            copy_words(self.folder, folder)

    @torch.no_grad()
    def restore(self, folder: Path, masters: Path | None = None) -> None:
        saved = dict(stored(folder, STEM))
        if bool(saved) != (self._adapter is not None):
            found, expected = ("an", "none") if saved else ("no", "one")
            raise UnusableCheckpoint(
                f"{folder}: holds {found} adapter, expected {expected}. Nothing is trained. Name the LoRA rank that "
                "this policy was started with, or none if it had none."
            )
        if masters is not None:
            self._take(Folder(folder, stored(masters.parent, masters.stem)))
        elif self._adapter is not None:
            names = {name for place in self._places.values() for name in place.names}
            self._take(Folder(folder, ((n, saved[saved_name(n)]) for n in names if saved_name(n) in saved)))
        else:
            self._take(Folder(folder))

    def _adapt(self, adapter: PeftModel) -> None:
        """From here on train only the adapter."""
        config = adapter.peft_config["default"]
        self._places = adapt(
            self._stage, self._places, self._tensor,
            rank=config.r, scale=config.lora_alpha / config.r, by_sequence=self._sizes.by_sequence,
            dtype=self._stage.config.autocast_dtype,
        )  # fmt: skip
        self.trained = {name: p for name, p in self._stage.named_parameters() if p.requires_grad}
        begun = {n: p.detach() for n, p in adapter.base_model.model.named_parameters() if p.requires_grad}
        self._take(Folder(self.folder, ((name, partial(begun.__getitem__, name)) for name in begun)))
        self._adapter = adapter.to("meta")
        self.published_dtype = torch.float32

    def _save_adapter(self, adapter: PeftModel, folder: Path) -> None:
        """Write one file of weights, as peft and engines read it: the leading process has room for an adapter."""
        mine = {name: value.clone() for name, value in self._collected({"": self.trained}).items()}
        everyones: list[Any] | None = [None] * dist.get_world_size() if self.leads else None
        dist.gather_object(mine, everyones)
        if everyones is not None:
            whole = {f"base_model.model.{name}": value for its in everyones for name, value in its.items()}
            adapter.save_pretrained(folder, state_dict=whole)
        dist.barrier()

    @torch.no_grad()
    def _take(self, tensors: Folder) -> None:
        for name, parameter in self.trained.items():
            parameter.copy_(held(self._places[name], self._tensor.rank(), parameter.shape, tensors))

    def save_state(self, folder: Path, stem: str, state: Mapping[str, Weights]) -> None:
        write_parts(folder, stem, self._collected(state))

    def load_state(self, folder: Path, stem: str) -> dict[str, dict[str, Tensor]] | None:
        return self._loaded(folder, stem, lambda whole: whole) or None

    def save_moments(self, folder: Path, moments: Mapping[str, Weights]) -> None:
        shapes = {name: p.shape for name, p in self.trained.items()}
        write_parts(folder, "optimizer", self._collected(moments, shapes))

    def load_moments(self, folder: Path) -> dict[str, dict[str, Tensor]]:
        return self._loaded(folder, "optimizer", lambda whole: part(whole, self._data).clone())

    def _loaded(self, folder: Path, stem: str, kept: Callable[[Tensor], Tensor]) -> dict[str, dict[str, Tensor]]:
        read_of = dict(stored(folder, stem))
        state: dict[str, dict[str, Tensor]] = {}
        for kind in sorted({key.rpartition("/")[0] for key in read_of}):
            prefix = f"{kind}/" if kind else ""
            for name, place in self._places.items():
                keys = [prefix + one for one in place.names]
                if all(key in read_of for key in keys):
                    state.setdefault(kind, {})[name] = self._held(place, [read_of[key]() for key in keys], kept)
        return state

    def _collected(
        self, state: Mapping[str, Weights], shapes: Mapping[str, torch.Size] | None = None
    ) -> dict[str, Tensor]:
        return collected(state, self._places, self._tensor, self._data, shapes=shapes)

    def _held(self, place: ParameterSource, values: list[Tensor], kept: Callable[[Tensor], Tensor]) -> Tensor:
        if values[0].ndim == 0:
            return values[0]
        return kept(place.part(torch.cat(values), self._tensor.rank())).to(self.device)

    def _counts(self, name: str) -> bool:
        """Whether this process counts a parameter.

        Each process counts its part of a parameter that is cut. Only one counts a parameter that all hold whole.
        """
        place = self._places[name]
        return not place.copied and (place.axis is not None or self._tensor.rank() == 0)

    def _counted(self, tensors: Weights) -> Iterator[tuple[str, Tensor]]:
        return ((name, value.detach()) for name, value in tensors.items() if self._counts(name))

    def _hidden(self, ids_BL: Tensor) -> Tensor:
        """Return this stage's output [L, B, H] for the rows; only its own tokens where rows are cut by token."""
        short = -ids_BL.shape[1] % self._sizes.tensor
        if self._sizes.by_sequence and short:
            ids_BL = functional.pad(ids_BL, (0, short))
        hidden: Tensor = self._stage(ids_BL, None, None)
        return hidden

    def _passed_on(self, suffixes: Sequence[Suffix]) -> Tensor:
        """Return what this stage gives to the next."""
        return self._hidden(Answers(suffixes, self.device, None).ids_RL)

    def _before_head(self, suffixes: Sequence[Suffix]) -> tuple[Answers, Tensor]:
        answers = Answers(suffixes, self.device, None)
        hidden_LBH = self._hidden(answers.ids_RL)
        if self._sizes.by_sequence:
            hidden_LBH = gather_from_sequence_parallel_region(hidden_LBH, group=self._tensor)
            # Without the padding that made the row's length divisible by the processes.
            return answers, answers.before(hidden_LBH[: answers.ids_RL.shape[1]].transpose(0, 1))
        # Only after `before`: backward, this call would return a gradient that is not contiguous without summing it.
        hidden_NH = answers.before(hidden_LBH.transpose(0, 1))
        return answers, copy_to_tensor_model_parallel_region(hidden_NH, group=self._tensor)

    @property
    def _head_rows(self) -> int:
        return self._shape.padded_vocabulary(self._sizes.tensor) // self._sizes.tensor

    def _logits(self, hidden_NH: Tensor, scale_N: Tensor) -> Tensor:
        logits_NV = functional.linear(hidden_NH, self._head[: self._rows.size]).float()
        return logits_NV / scale_N.unsqueeze(1)

    def _scores(self, logits_NV: Tensor, ids_NE: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor]:
        entropy_N = reducing.entropies(logits_NV.detach(), self._rows) if entropy else logits_NV.new_empty(0)
        return reducing.logprobs(logits_NV, ids_NE, self._rows), entropy_N

    def _top_ids(self, logits_NV: Tensor, num_tokens: int) -> Tensor:
        return reducing.likeliest(logits_NV, num_tokens, self._rows)

    @property
    def _head(self) -> Tensor:
        """The rows [V, H] of this process, padding too; on the last stage."""
        stage = self._stage
        head: Tensor = stage.shared_embedding_or_output_weight() if self._shape.tied else stage.output_layer.weight
        return head

    def _in_groups(
        self, suffixes: Sequence[Suffix], scored: ScoreGroup, budget_tokens: int, dtypes: Sequence[torch.dtype],
        tail: tuple[int, ...],
    ) -> list[AnswerTensors]:  # fmt: skip
        found: dict[int, AnswerTensors] = {}

        def step(group: Sequence[int]) -> Tensor:
            chosen = [suffixes[i] for i in group]
            if not self._last:
                return self._passed_on(chosen)
            found.update(zip(group, scored(chosen), strict=True))
            return torch.zeros((), device=self.device)

        run(self._stage, self.groups(suffixes, budget_tokens=budget_tokens), step, forward_only=True)
        lengths = [len(s.response_ids) for s in suffixes]
        columns = []
        for number, dtype in enumerate(dtypes):
            joined = torch.zeros((sum(lengths), *tail), dtype=dtype, device=self.device)
            if self._last and suffixes:
                joined = torch.cat([found[i][number] for i in range(len(suffixes))])
            self._broadcast(joined)
            columns.append(torch.split(joined, lengths))
        return list(zip(*columns, strict=True))

    def _broadcast(self, values: Tensor) -> None:
        """Send the last stage's values to all stages."""
        dist.broadcast(values, dist.get_global_rank(self._pipeline, self._pipeline.size() - 1), group=self._pipeline)
