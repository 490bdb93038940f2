"""What becomes a sample, how rewards add up, and how batches are trained on: the settings and their clashes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from clawstream.config.sections import Address, Section

RECIPE: Mapping[str, float | str] = {  # as in the original; its other settings are our defaults
    "kl": 0.0,
    "w_topk": 0.0,
    "teacher": "reference",
    "rehearsal_share": 0.0,
}
FULL_RATE = 1e-5
CORRECTION_EPOCHS = 4
ADAPTER_RATE = 1e-4  # an adapter begins as nothing, and bears more
SERVICE_RANK = 32  # of the adapter that a service trains

OF_REWARDS = ("binary", "stepwise")  # methods that learn from rewards alone
_OF_HINTS = ("w_opd", "w_topk", "teacher", "hint_choice", "rehearsal_share", "cadence", "late", "answers_per_hint")
IDLE: Mapping[str, tuple[tuple[str, ...], str]] = {  # by method: settings without effect, and why
    "topk": (("loss", "w_binary", "w_topk"), "compares whole distributions, and has no advantages"),
    "stepwise": (_OF_HINTS, "compares the attempts of a group, and learns from no hints"),
    "binary": (_OF_HINTS, "learns from rewards alone"),
    "opd": (("w_binary", "w_topk"), "learns from hints alone, by the gaps at sampled tokens"),
}


def usual_teacher(method: str, *, diverges: bool) -> Literal["contrast", "reference"]:
    """Return the teacher that is taken where none is set; `diverges`: its whole distribution counts too.

    A contrast alone never says that the policy has gone far enough: the divergence has to.
    """
    return "contrast" if method == "combined" and diverges else "reference"


class SamplesSettings(Section):
    """What becomes a sample."""

    off_distribution: Literal["refuse", "gateway_override"] = Field(
        "refuse",
        description="answers that a client wants sampled otherwise (top_p, penalties, a grammar): refuse gives no "
        "sample, with method = topk one of the hint alone; gateway_override samples as if they didn't",
    )
    interrupted: bool = Field(
        False,
        description="train on the part of an answer that was sent before a person stopped it; it is judged in any case",
    )


class RewardsSettings(Section):
    """How much each source counts in a sample's reward: the weighted sum of those that count, -1 to 1."""

    judge: float = Field(
        1.0, ge=0, description="of verdicts; they are only recorded at 0, as of all four, and where a person scored"
    )
    person: float = Field(
        1.0, ge=0, description="of thumbs and scores that people give, in place of judge and heuristic"
    )
    environment: float = Field(1.0, ge=0, description="of outcomes that environments report")
    heuristic: float = Field(1.0, ge=0, description="of heuristic_function's scores")
    heuristic_function: str | None = Field(
        None,
        description="an entry point of the group clawstream.heuristics that scores finished turns; none: no function",
    )

    @property
    def weights(self) -> dict[str, float]:
        """The weights, by source."""
        return self.model_dump(include={"judge", "person", "environment", "heuristic"})


class TrainingSettings(Section):
    """Micro-batches and losses: docs/training.md."""

    batch_samples: int = Field(
        16, ge=1, description="samples of a step, rehearsals on top; after max_wait_s it is taken on fewer"
    )
    max_wait_s: float = Field(3600.0, gt=0, description="after the oldest waiting sample; then a step takes fewer")
    cadence: Literal["batch", "correction"] = Field(
        "batch",
        description="when a step is taken: batch: once batch_samples wait; correction: also seconds after a hint, on "
        "the policy's new answers to its prompts, unseen",
    )
    group_wait_s: float = Field(
        1800.0,
        gt=600,  # a judge may need that long for an attempt
        le=7 * 86_400,  # an attempt is forgotten after that
        description="how long a group waits, after its first attempt ended, for the others to end and for outcomes",
    )
    max_versions_behind: int | None = Field(
        None, ge=0, description="samples further behind are dropped; none: no sample is"
    )
    late: Literal["record", "refresh"] = Field(
        "record",
        description="a sample that comes after its turn was trained on: record keeps it on the log; refresh, where it "
        "has a hint, has its prompt answered again, unseen, and trains on that",
    )
    answers_per_hint: int = Field(
        1, ge=1, le=64, description="answers that a hint scores, the turn's own included; nobody is shown the others"
    )
    rehearsal_share: float | None = Field(
        None,
        ge=0,
        le=0.5,
        description="of a batch, for past hints: the policy answers their prompts again, unseen; more while it does "
        "not follow them, up to half of a batch; none: a third, or 0 where no hint teaches or an engine is teacher",
    )
    max_updates: int | None = Field(None, ge=1, description="stop after this many; none: never")
    method: Literal["combined", "binary", "opd", "topk", "stepwise"] = Field(
        "combined",
        description="what is learned from: verdicts and hints, verdicts, hints (two ways), or steps of agents",
    )
    recipe: Literal["clawstream", "openclaw-rl"] = Field(
        "clawstream",
        description="openclaw-rl: its losses as published, without our bounds, baseline and falling rate, and unless "
        "they are set kl, w_topk and rehearsal_share 0 and teacher reference",
    )
    loss: Literal["ppo", "importance_sampling", "cispo"] = Field(
        "ppo", description="how advantages act: clipped, unclipped, or with the ratio alone clipped"
    )
    w_binary: float = Field(
        1.0, ge=0, description="weight of the reward in an advantage; at 0 combined learns from hints alone"
    )
    w_opd: float = Field(1.0, gt=0, description="weight of the hint in an advantage; to drop it: method = 'binary'")
    w_topk: float | None = Field(
        None,
        ge=0,
        description="combined: weight of the forward divergence from the teacher's 50 likeliest tokens; none: 1, or "
        "0 with hint_choice = overlap and where there is no such divergence",
    )
    w_thinking: float = Field(
        1.0,
        ge=0,
        description="weight of an answer's thought in its loss, as no judge saw it; 0: it is not learned from",
    )
    kl: float = Field(0.02, ge=0, description="weight of the leash, the policy's divergence from the base; 0: none")
    epochs: int = Field(
        default_factory=lambda known: CORRECTION_EPOCHS if known.get("cadence") == "correction" else 1,
        ge=1,
        description="passes over each batch; where not set 1, or 4 with cadence = 'correction'",
    )
    teacher: Address | None = Field(
        None,
        pattern=r"^(contrast|reference|https?://\S+)$",
        description="who says, with the hint in its prompt, how an answer should have been: the base (contrast: less "
        "what it says without; reference: less what the policy says), or the engine at http://HOST:PORT; none: "
        "contrast or reference",
    )
    hint_choice: Literal["longest", "fall", "overlap"] = Field(
        "longest",
        description="of up to three hints that judges offer, the one to train on: the longest, the one by which the "
        "teacher likes the answer least, or the one whose teacher is nearest to the policy, learned on the policy's "
        "four likeliest tokens alone",
    )
    gate: bool = Field(True, description="a step that does harm is not published; its samples are used up all the same")
    trainer: Literal["torch", "megatron", "tinker"] = Field(
        "torch",
        description="torch cuts by FSDP where processes > 1; tinker: a service elsewhere trains (tinker.url)",
    )
    lora_rank: int | None = Field(
        default_factory=lambda known: SERVICE_RANK if known.get("trainer") == "tinker" else None,
        ge=1,
        description="none: all weights are trained, or by a service an adapter of rank 32",
    )
    learning_rate: float = Field(
        default_factory=lambda known: ADAPTER_RATE if known.get("lora_rank") else FULL_RATE,
        ge=0,
        description="where not set, 1e-5, or 1e-4 with lora_rank; 0: every version is the base, a control",
    )
    processes: int = Field(1, ge=1, description="of the trainer; each has a GPU of its own, if any")
    tensor_parallel: int = Field(
        1, ge=1, description="megatron: processes that share each matrix, and between matrices the tokens"
    )
    pipeline_parallel: int = Field(1, ge=1, description="megatron: processes that have the layers one after the other")
    micro_batch_tokens: int = Field(16_384, ge=64, description="in a pass; a beginning that answers share counts once")
    gradient_checkpointing: bool = Field(False, description="less memory, more time: layers are computed twice")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="of matrix products; weights, sums of their gradients, optimizer and log-softmax are float32",
    )
    keep_checkpoints: int = Field(5, ge=1, description="newest versions that a rollback reaches, beside pinned ones")
    seed: int = Field(0, description="of an adapter's first weights, and of the answers that the gate samples")
    save_dir: Path | None = Field(None, description="where versions are kept; none: in the data folder")

    @model_validator(mode="before")
    @classmethod
    def _as_the_recipe_has_it(cls, said: Any) -> Any:
        if isinstance(said, dict) and said.get("recipe") == "openclaw-rl":
            idle, _ = IDLE.get(said.get("method", "combined"), ((), ""))
            return {name: value for name, value in RECIPE.items() if name not in idle} | said
        return said

    @model_validator(mode="after")
    def _each_has_an_effect(self) -> "TrainingSettings":
        names, why = IDLE.get(self.method, ((), ""))
        fields = type(self).model_fields
        if idle := [name for name in names if getattr(self, name) not in (fields[name].default, 0)]:
            raise ValueError(
                f"{', '.join(idle)}: no effect: method = {self.method!r} {why}. Leave them out, or take another method"
            )
        if self.w_binary == 0 and self.method in OF_REWARDS:
            raise ValueError(
                f"w_binary = 0: method = {self.method!r} learns from rewards, and nothing is left. Take another method"
            )
        if self.by_engine and (self.divergence_weight or self.rehearsal_share or self.corrects):
            raise ValueError(
                "an engine as teacher scores answers on their way to samples, token by token: method = 'topk', w_topk, "
                "rehearsal_share and cadence = 'correction' need the trainer as teacher. Leave them out, or the engine"
            )
        if self.chooses_hints and (self.by_engine or self.corrects):
            raise ValueError(
                f"hint_choice = {self.hint_choice!r} is made just before a step: by then an engine as teacher has "
                "scored the longest hint, and with cadence = 'correction' the policy was asked for answers to it. "
                "Leave it out, or take another teacher and cadence = 'batch'"
            )
        if self.by_service and (self.divergence_weight or self.by_support or self.processes > 1):
            raise ValueError(
                "trainer = 'tinker': the service trains, and tells the log-probs of given tokens alone. Leave method = "
                "'topk', w_topk, hint_choice = 'overlap' and processes out, or take trainer = 'torch'"
            )
        if self.by_support and self.method == "topk":
            raise ValueError(
                "hint_choice = 'overlap' learns on the policy's likeliest tokens, method = 'topk' on the teacher's. "
                "Take hint_choice = 'fall', or another method"
            )
        return self

    @property
    def chooses_hints(self) -> bool:
        """Whether the trainer takes one of several offered hints."""
        return self.hint_choice != "longest"

    @property
    def by_support(self) -> bool:
        """Whether a hint is learned on the policy's likeliest tokens, in place of the sampled one."""
        return self.hint_choice == "overlap"

    @property
    def as_published(self) -> bool:
        """Whether losses are the original's, without the bounds and baselines that are ours."""
        return self.recipe == "openclaw-rl"

    @property
    def taught_by(self) -> str:
        """The teacher: the one that is set, or the usual one."""
        return self.teacher or usual_teacher(self.method, diverges=self.divergence_weight > 0)

    @property
    def corrects(self) -> bool:
        """Whether a correction is trained on as soon as it came."""
        return self.cadence == "correction"

    @property
    def by_engine(self) -> bool:
        """Whether the teacher is an engine, at the address that `teacher` is."""
        return self.teacher is not None and "://" in self.teacher

    @property
    def refreshes(self) -> bool:
        """Whether prompts of the past are answered again."""
        return self.late == "refresh" or self.answers_per_hint > 1 or self.rehearsed_share > 0 or self.corrects

    @property
    def rehearsed_share(self) -> float:
        """The share of past hints in a batch."""
        if self.rehearsal_share is not None:
            return self.rehearsal_share
        return 1 / 3 if self.weights[1] > 0 and not self.by_engine else 0.0

    @model_validator(mode="after")
    def _cut_as_the_trainer_can(self) -> "TrainingSettings":
        cut = self.tensor_parallel * self.pipeline_parallel
        if self.trainer != "megatron" and cut > 1:
            raise ValueError(
                "trainer = 'torch' cuts no matrices or layers: tensor_parallel and pipeline_parallel are megatron's. "
                "Leave them out, or take 'megatron'"
            )
        if self.processes % cut:
            raise ValueError(
                f"processes = {self.processes} is no multiple of tensor_parallel * pipeline_parallel = {cut}: each "
                "copy of the model needs so many"
            )
        return self

    @property
    def by_service(self) -> bool:
        """Whether a service elsewhere trains and samples the policy."""
        return self.trainer == "tinker"

    @property
    def is_alone(self) -> bool:
        """Whether one process trains, without a team."""
        return self.trainer == "torch" and self.processes == 1

    @property
    def weights(self) -> tuple[float, float]:
        """The weights of rewards and hints, (binary, opd), under the method."""
        binary = 0.0 if self.method in ("opd", "topk") else self.w_binary
        opd = 0.0 if self.method in ("binary", "stepwise") else self.w_opd
        return binary, opd

    @property
    def divergence_weight(self) -> float:
        """How much the distance from the teacher's whole distribution counts."""
        if self.method == "topk":
            return self.w_opd
        return float(self._can_diverge) if self.w_topk is None else self.w_topk

    @property
    def resolved(self) -> "TrainingSettings":
        """The same settings with every derived value written out, so that later releases read them alike."""
        w_topk = float(self._can_diverge) if self.w_topk is None else self.w_topk
        derived = {"w_topk": w_topk, "teacher": self.taught_by, "rehearsal_share": self.rehearsed_share}
        idle, _ = IDLE.get(self.method, ((), ""))
        return self.model_copy(update={name: value for name, value in derived.items() if name not in idle})

    @property
    def _can_diverge(self) -> bool:
        """Whether the teacher's whole distribution can count beside the gaps at the sampled tokens."""
        return self.method == "combined" and not (self.by_engine or self.by_support or self.by_service)

    @property
    def asks_likeliest(self) -> bool:
        """Whether the teacher is asked for its likeliest tokens."""
        return self.method == "topk" or self.divergence_weight > 0
