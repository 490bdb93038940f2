"""What each GPU of a machine would hold, and the largest way of training that fits. Nothing is asked of a GPU.

The actor, rollout and judge get the GPUs that `clawstream launch` gives them. On a machine with one GPU trainer and
engine are on it side by side.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from clawstream.config import KEYS_RANK, Settings, TrainingSettings
from clawstream.errors import ConfigError
from clawstream.local.servers.sglang_servers import FLAGS, GpuCounts, adapter_flags, share_out
from clawstream.training.footprint import FLOAT32, Decoder, engine_bytes, pass_operations, trainer_bytes

_SAID = ("trainer", "processes", "lora_rank", "dtype", "gradient_checkpointing", "micro_batch_tokens")
ROOM = 1.3  # what torch reserved was 1.08 to 1.26 times what is told here (one H200, trainer_gpu.json)
STATIC_SHARE = 0.85  # of a GPU, for an engine's weights and cache; graphs and what a pass computes take the rest
MICRO_BATCHES = (16_384, 8192, 4096)  # tokens
CONTEXT_TOKENS = 16_384  # of the longest conversation that is planned for, if nothing is said
MOST_GPUS = 64  # of a machine
_TP = (1, 2, 4, 8)  # GPUs of an engine
ADAPTERS_LOADED = 4  # that `launch` has an engine make room for
STEP_ANSWERS, STEP_TOKENS = 24, 1024  # of the step that is counted: 16 samples and 8 rehearsals, prompts included


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs of one size."""

    count: int
    size_bytes: float

    @classmethod
    def of(cls, text: str) -> "Gpus | None":
        """Return what "4x24GB" says; a GB is 10^9 bytes, so that no card holds less. None: it says nothing."""
        count, _, size = text.strip().lower().removesuffix("gb").partition("x")
        try:
            found = cls(count=int(count), size_bytes=float(size) * 1e9)
        except ValueError:
            return None
        return found if 0 < found.count <= MOST_GPUS and 0 < found.size_bytes < float("inf") else None

    def __str__(self) -> str:
        return f"{self.count}x{self.size_bytes / 1e9:.4g}GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """What one GPU holds."""

    number: int
    role: str  # actor, rollout or judge, or actor and rollout
    bytes_by_use: Mapping[str, float]
    peak_bytes: float  # of all uses, and of what is reserved beside them
    of_bytes: float

    @property
    def fits(self) -> bool:
        """Whether the GPU is large enough."""
        return self.peak_bytes <= self.of_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """Who holds what, under these settings of the trainer and sizes of engines."""

    training: TrainingSettings
    tensor_parallel: int  # GPUs of an engine
    judge_tensor_parallel: int
    cache_tokens: int  # that an engine's cache has room for
    static_share: float  # SGLang's --mem-fraction-static
    engine_flags: tuple[str, ...]  # without which it neither says versions rightly nor loads adapters
    uses: tuple[GpuUse, ...]
    idle: tuple[int, ...]  # the actor's GPUs that no process of the trainer uses
    step_operations: float
    version_bytes: float  # of a published version, which engines read
    state_bytes: float  # beside it, to go on from

    @property
    def fits(self) -> bool:
        """Whether each GPU is large enough."""
        return all(use.fits for use in self.uses)

    @property
    def fullest(self) -> str:
        """What the GPU with the least room would need, in words."""
        use = max(self.uses, key=lambda one: one.peak_bytes)
        return f"GPU {use.number} ({use.role}) would need {use.peak_bytes / 1e9:.1f} GB of {use.of_bytes / 1e9:g}"

    @property
    def said(self) -> Mapping[str, object]:
        """The settings of [training] that memory follows from."""
        return {name: getattr(self.training, name) for name in _SAID}


def plan_for(model: Decoder, judge: Decoder, gpus: Gpus, settings: Settings, *, context_tokens: int) -> GpuPlan:
    """Return the first plan that fits: all weights before an adapter, long passes before short ones.

    What the settings say under [training] is kept to. Where nothing fits, the plan that needs least of its fullest GPU
    is returned. A conversation of `context_tokens` has to fit into an engine's cache, and into the trainer as a sample.
    Raises ConfigError for Megatron, which is not planned for.
    """
    found = [_with(one, model, judge, gpus, context_tokens) for one in _ways(settings, context_tokens)]
    fitting = next((one for one in found if one.fits), None)
    return fitting or min(found, key=lambda one: max(use.peak_bytes for use in one.uses))


def plan_as_set(
    model: Decoder, judge: Decoder, gpus: Gpus, settings: Settings, counts: GpuCounts, *, tp: int, judge_tp: int,
    context_tokens: int,
) -> GpuPlan:  # fmt: skip
    """Return what each GPU holds if nothing is chosen: these settings, these shares, engines of so many GPUs."""
    return _with(settings, model, judge, gpus, context_tokens, counts=counts, cuts=(tp, judge_tp))


def what_fits(model: Decoder, judge: Decoder, gpus: Gpus, settings: Settings, *, context_tokens: int) -> Gpus | None:
    """Return the fewest GPUs of the same size that would do, of up to `MOST_GPUS`; None: none do."""
    for count in range(gpus.count + 1, MOST_GPUS + 1):
        more = Gpus(count=count, size_bytes=gpus.size_bytes)
        if plan_for(model, judge, more, settings, context_tokens=context_tokens).fits:
            return more
    return None


def _ways(settings: Settings, context_tokens: int) -> Iterator[Settings]:
    training = settings.training
    said = training.model_fields_set
    ranks = (training.lora_rank,) if "lora_rank" in said else (None, KEYS_RANK)
    sizes = [size for size in MICRO_BATCHES if size >= context_tokens] or [MICRO_BATCHES[0]]
    usual = {"dtype": "bfloat16", "gradient_checkpointing": True}
    for rank in ranks:
        for size in sizes[:1] if "micro_batch_tokens" in said else sizes:
            chosen = usual | {"micro_batch_tokens": size, "lora_rank": rank}
            update = {name: value for name, value in chosen.items() if name not in said}
            yield settings.model_copy(update={"training": training.model_copy(update=update)})


def _with(
    settings: Settings, model: Decoder, judge: Decoder, gpus: Gpus, context_tokens: int, *,
    counts: GpuCounts | None = None, cuts: tuple[int, int] | None = None,
) -> GpuPlan:  # fmt: skip
    if settings.training.trainer != "torch":
        raise ConfigError(
            'training.trainer = "megatron": its memory is not told here, torch\'s is. Nothing was planned. Leave the '
            "setting out for a plan"
        )
    training, alone = settings.training, gpus.count == 1
    counts = counts or share_out(gpus.count, None, None, None)
    if "processes" not in training.model_fields_set:
        training = training.model_copy(update={"processes": counts.actor})
    if training.processes > counts.actor:
        raise ConfigError(
            f"training.processes is {training.processes}, and of {gpus} the actor gets {counts.actor}: each process "
            "has a GPU of its own. Nothing was planned. Leave the setting out, or name more GPUs"
        )
    trained = trainer_bytes(model, training, sample_tokens=context_tokens)
    taken = ROOM * sum(trained.values())
    rank = training.lora_rank
    room = STATIC_SHARE * (gpus.size_bytes - (taken if alone else 0.0))
    judge_room = STATIC_SHARE * gpus.size_bytes
    sizes, judge_sizes = (_TP, _TP) if cuts is None else ((cuts[0],), (cuts[1],))
    tp, weights = _cut(model, counts.rollout, room, context_tokens, rank=rank, sizes=sizes)
    judge_tp, judging = _cut(judge, max(counts.judge, 1), judge_room, context_tokens, rank=None, sizes=judge_sizes)
    served = _served(weights, model, tp, context_tokens)
    judged = _served(judging, judge, judge_tp, context_tokens)
    needed = sum(served.values()) / STATIC_SHARE
    if alone:
        held = [("actor and rollout", trained | served, taken + needed)]
    else:
        held = [("actor", trained, taken)] * counts.actor + [("rollout", served, needed)] * counts.rollout
    held += [("judge", judged, sum(judged.values()) / STATIC_SHARE)] * counts.judge
    idle = range(training.processes, counts.actor)
    uses = [
        GpuUse(number=number, role=role, bytes_by_use=uses, peak_bytes=peak, of_bytes=gpus.size_bytes)
        for number, (role, uses, peak) in enumerate(held)
        if number not in idle
    ]
    numbers = model.numbers if rank is None else model.adapter(rank)
    stored = model.stored_bytes if rank is None else FLOAT32
    return GpuPlan(
        training=training,
        tensor_parallel=tp,
        judge_tensor_parallel=judge_tp,
        cache_tokens=max(0, int((room - weights) / model.cached_bytes(tp))),
        static_share=max(0.0, room / gpus.size_bytes),
        engine_flags=(*FLAGS, *adapter_flags(settings)),
        uses=tuple(uses),
        idle=tuple(idle),
        step_operations=training.epochs * pass_operations(model, STEP_ANSWERS * STEP_TOKENS, adapter=rank is not None),
        version_bytes=float(stored * numbers),
        state_bytes=float((2 if stored == FLOAT32 else 3) * FLOAT32 * numbers),  # moments, and exact weights
    )


def _served(weights: float, model: Decoder, tp: int, context_tokens: int) -> dict[str, float]:
    return {"engine weights": weights, "cache of one conversation": context_tokens * model.cached_bytes(tp)}


def _cut(
    model: Decoder, count: int, room: float, context_tokens: int, *, rank: int | None, sizes: Sequence[int]
) -> tuple[int, float]:
    """Return over how many of `count` GPUs an engine is cut, the fewest that hold it, and what its weights take there.

    Where none do, that is over all that the heads can be dealt to.
    """
    for tp in [tp for tp in sizes if count % tp == 0 and model.num_groups % tp == 0] or sizes[:1]:
        weights = engine_bytes(model, tensor_parallel=tp, adapter_rank=rank, num_adapters=ADAPTERS_LOADED)
        if weights + context_tokens * model.cached_bytes(tp) <= room:
            break
    return tp, weights
