"""The life of a policy: batches planned, steps taken or rejected, versions published and taken over by engines.

Version 0 is the base; the n-th plan names version n. A number is used once: that of a rejected step is never published
or planned again, and the next version's parent is the version before the rejected one. So each plan ends in StepTaken
with PolicyPublished, or in StepRejected; both use up its samples. A sample's age in versions counts published versions
alone.
"""

from dataclasses import dataclass
from typing import ClassVar

from clawstream.events.base import PolicyEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseNamed(PolicyEvent):
    """The base of a policy, named by a part that found none on the log; of each hash only the first ever counts.

    A part that has no weights at hand names the tokenizer alone.
    """

    IDENTITY: ClassVar = ("policy_id", "path", "model_sha256", "tokenizer_sha256", "named_at_ms")

    path: str  # of the base's folder at that time
    model_sha256: str | None  # of its weights and config.json; None: no weights were there
    tokenizer_sha256: str | None  # of its vocabulary's files; None: there were none
    named_at_ms: int  # since the epoch, UTC


@dataclass(frozen=True, slots=True, kw_only=True)
class _VersionEvent(PolicyEvent):
    """A fact about one version of a policy."""

    IDENTITY: ClassVar[tuple[str, ...]] = ("policy_id", "policy_version")

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOffset:
    """The next offset to read of a partition."""

    topic: str
    partition: int
    next_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """The turn of a planned sample, and who judged it; no other revision of that turn is ever planned."""

    turn_id: str  # or the id of a refreshed answer, which counts as a turn of its own
    judge: str
    prompt_version: str
    revision: int  # of the planned sample
    num_feedback: int | None = None  # that the sample knows; None: none


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlanned(_VersionEvent):
    """What the step that makes `policy_version` trains on; written before the step, and executed as written."""

    parent_version: int
    sample_ids: tuple[str, ...]  # in training order
    offsets: tuple[TopicOffset, ...]  # all records before these are in this batch or an earlier one, or were dropped
    seed: int
    settings: bytes  # the training settings, as JSON
    planned_at_ms: int  # since the epoch, UTC
    replay: str | None = None  # the replay that the samples are of; None: the live ones
    rollback: int | None = None  # the number of the rollback that this plan is, without samples; None: no rollback
    turns: tuple[PlannedTurn, ...]  # of the samples, in their order
    advantages: tuple[float, ...] | None = None  # of the samples, in their order; None: computed from the rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken(_VersionEvent):
    """An optimizer step was taken and its checkpoint is whole on disk. Losses and log-probs in nats."""

    num_samples: int
    num_hinted: int
    num_rewarded: int
    num_tokens: int  # trained
    num_tokens_dropped: int  # not trained: a log-prob was missing or not finite
    loss_nats: float | None  # None: no token could be trained on, so the weights stayed
    kl_reference_nats: float | None  # None: nothing was trained on, or no reference was asked for
    mean_gap_nats: float | None  # teacher - old; None: no hint counts by its gap
    mean_reward: float | None  # None: no sample has a reward
    clipped_share: float | None  # None: nothing can be clipped, as with one step a batch
    grad_norm: float | None  # before clipping; None: nothing was trained on
    learning_rate: float
    mean_versions_behind: float  # versions published after the samples' newest sampling version, up to the parent
    max_versions_behind: int
    step_ms: int
    taken_at_ms: int
    entropy_nats: float | None = None  # the policy's mean over trained tokens; None: there were none
    behaviour_kl_nats: float | None = None  # sampled - old, a token: how far the engine's policy was from the trainer's
    mean_response_tokens: float | None = None  # of the answers trained on
    weights_changed_share: float | None = None  # of the published numbers; None: no step was taken


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRejected(_VersionEvent):
    """A plan's step would have harmed the policy: its version does not exist, and the policy is unchanged."""

    num_samples: int  # used up by the plan
    reason: str
    step_ms: int
    rejected_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPublished(_VersionEvent):
    """The weights of a version lie at `path`, whole, and engines may take them over."""

    parent_version: int | None  # None: the base
    path: str
    adapter: str | None  # the name under which requests ask for it, if it is a LoRA adapter; None: full weights
    manifest_sha256: str | None  # None: the base, which has no manifest
    num_bytes: int
    published_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyActivated(_VersionEvent):
    """An engine serves this version from now on."""

    IDENTITY: ClassVar = ("policy_id", "policy_version", "engine", "activated_at_ms")

    engine: str  # its address
    adapter: str | None  # as published
    pause_ms: float  # how long no token was sampled
    num_bytes: int
    activated_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRejected(_VersionEvent):
    """An engine did not take this version over, and keeps serving what it served."""

    IDENTITY: ClassVar = ("policy_id", "policy_version", "engine", "rejected_at_ms")

    engine: str
    reason: str
    rejected_at_ms: int
