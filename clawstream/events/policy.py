"""The life of a policy: batches planned, steps taken or rejected, versions published and taken over by engines.

Version 0 is the base; the n-th plan names version n. A number is given once: that of a rejected step is never
published, no later plan has it, and the next version's parent is the one before it. So of each plan the log says one of
two things in the end, StepTaken with PolicyPublished, or StepRejected, and its samples are used up by either. How many
versions old a sample is counts those that were published since; steps on record from before that was so counted the
numbers of rejected steps too.
"""

from dataclasses import dataclass
from typing import ClassVar

from clawstream.events.base import PolicyEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseNamed(PolicyEvent):
    """A part found no base named, and names its own; of each hash the first on the log counts, and no other is taken.

    A part that has no weights to look at names the tokenizer alone.
    """

    IDENTITY: ClassVar = ("policy_id", "path", "model_sha256", "tokenizer_sha256", "named_at_ms")

    path: str  # where it lay
    model_sha256: str | None  # of its weights and config.json; None: no weights were there
    tokenizer_sha256: str | None  # of its vocabulary's files; None: there were none
    named_at_ms: int  # since the epoch, UTC


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOffset:
    """The next offset to read of a partition."""

    topic: str
    partition: int
    next_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """The turn that a planned sample is of, and who judged it; no other revision of it is ever planned."""

    turn_id: str  # or the id of an answer given anew, which stands for itself
    judge: str
    prompt_version: str
    revision: int | None = None  # that is planned, and how much feedback it knows; None: not said
    num_feedback: int | None = None  # None: none, too


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlanned(PolicyEvent):
    """What the step that makes `policy_version` trains on; written before the step, and executed as written."""

    IDENTITY: ClassVar = ("policy_id", "policy_version")

    policy_version: int
    parent_version: int
    sample_ids: tuple[str, ...]  # in training order
    offsets: tuple[TopicOffset, ...]  # all records before these are in this batch or an earlier one, or were dropped
    seed: int
    settings: bytes  # the training settings, as JSON
    planned_at_ms: int  # since the epoch, UTC
    replay: str | None = None  # whose samples they are; None: the live ones
    rollback: int | None = None  # the number of the rollback that it carries out, without a sample; None: it is none
    turns: tuple[PlannedTurn, ...] | None = None  # of the samples, in their order; None: not said
    advantages: tuple[float, ...] | None = None  # of the samples, in their order; None: they follow from their rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken(PolicyEvent):
    """An optimizer step was taken and its checkpoint is whole on disk. Losses and log-probs in nats."""

    IDENTITY: ClassVar = ("policy_id", "policy_version")

    policy_version: int
    num_samples: int
    num_hinted: int
    num_rewarded: int
    num_tokens: int  # trained
    num_tokens_dropped: int  # a log-prob was missing or not finite
    loss_nats: float | None  # None: no token could be trained on, so the weights stayed
    kl_reference_nats: float | None  # None: nothing was trained on, or no reference was asked for
    mean_gap_nats: float | None  # teacher - old; None: no hint counts by it
    mean_reward: float | None  # None: no sample has a reward
    clipped_share: float | None  # None: nothing can be clipped, as with one step a batch
    grad_norm: float | None  # before clipping; None: nothing was trained on
    learning_rate: float
    mean_versions_behind: float  # published after the samples' newest sampling version, up to the parent
    max_versions_behind: int
    step_ms: int
    taken_at_ms: int
    entropy_nats: float | None = None  # of the policy at the tokens trained on, a token; None: none was, or not said
    behaviour_kl_nats: float | None = None  # sampled - old, a token: how far the engine's policy was from the trainer's
    mean_response_tokens: float | None = None  # of the answers trained on
    weights_changed_share: float | None = None  # of the published numbers; None: no step was taken, or not said


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRejected(PolicyEvent):
    """What a plan's step came to would do harm: there is no such version, and the policy is as it was before."""

    IDENTITY: ClassVar = ("policy_id", "policy_version")

    policy_version: int
    num_samples: int  # used up by it
    reason: str
    step_ms: int
    rejected_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPublished(PolicyEvent):
    """The weights of a version lie at `path`, whole, and engines may take them over."""

    IDENTITY: ClassVar = ("policy_id", "policy_version")

    policy_version: int
    parent_version: int | None  # None: the base
    path: str
    adapter: str | None  # the name under which requests ask for it, if it is a LoRA adapter; None: full weights
    manifest_sha256: str | None  # None: the base, which has no manifest
    num_bytes: int
    published_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyActivated(PolicyEvent):
    """An engine serves this version from now on."""

    IDENTITY: ClassVar = ("policy_id", "policy_version", "engine", "activated_at_ms")

    policy_version: int
    engine: str  # its address
    adapter: str | None  # as published
    pause_ms: float  # how long no token was sampled
    num_bytes: int
    activated_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRejected(PolicyEvent):
    """An engine did not take this version over; it serves what it served."""

    IDENTITY: ClassVar = ("policy_id", "policy_version", "engine", "rejected_at_ms")

    policy_version: int
    engine: str
    reason: str
    rejected_at_ms: int
