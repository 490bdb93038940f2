"""The life of a policy: batches planned, steps taken or rejected, versions published and taken over by engines.

Version 0 is the base; the n-th plan names version n. A number is used once: the number of a rejected step is never
planned again or published, and the next version's parent is the version before the rejected one. Each plan ends in
StepTaken and PolicyPublished, or in StepRejected; either way its samples are used up. A sample's age in versions counts
published versions only.
"""

from dataclasses import dataclass
from typing import ClassVar

from clawstream.events.base import PolicyEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseNamed(PolicyEvent):
    """The base of a policy, named by a process that found no base on the log.

    The first event with a model counts, and the first with a tokenizer: a process without weights names no model.
    """

    IDENTITY: ClassVar = ("policy_id", "path", "model_sha256", "tokenizer_sha256", "named_at_ms")

    path: str  # where the base's folder was at that time
    model_sha256: str | None  # of its weights and config.json; None: no weights were there
    tokenizer_sha256: str | None  # of its vocabulary's files; None: there were no such files
    named_at_ms: int  # since the epoch, UTC


@dataclass(frozen=True, slots=True, kw_only=True)
class _VersionEvent(PolicyEvent):
    """A fact about one version of a policy."""

    IDENTITY: ClassVar[tuple[str, ...]] = ("policy_id", "policy_version")

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOffset:
    """Where to read on in a partition."""

    topic: str
    partition: int
    next_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """The turn of a planned sample, and who judged it. No other sample of that turn is ever planned."""

    turn_id: str  # or the id of a refreshed answer, which counts as a turn of its own
    judge: str
    prompt_version: str
    revision: int  # of the planned sample
    num_feedback: int | None = None  # as the sample has it


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlanned(_VersionEvent):
    """What the step that makes `policy_version` trains on; written before the step, which then follows it exactly."""

    parent_version: int
    sample_ids: tuple[str, ...]  # in training order
    offsets: tuple[TopicOffset, ...]  # each record before these is in this batch, in an earlier one, or was dropped
    seed: int
    settings: bytes  # the training settings, as JSON
    planned_at_ms: int  # since the epoch, UTC
    replay: str | None = None  # the replay that made the samples; None: they are the live ones
    rollback: int | None = None  # the number of the rollback that this plan carries out, without samples; None: none
    turns: tuple[PlannedTurn, ...]  # of the samples, in their order
    advantages: tuple[float, ...] | None = None  # of the samples, in their order; None: computed from the rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """A held hint in a batch, and how far the policy was from following it."""

    hint_id: str
    open_nats: float | None  # per token: the answer's log-prob by the policy less the teacher's; None: not known
    gain_nats: float | None = None  # the base's log-prob of the answer: with the hint, less without it; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedHint:
    """A held hint, and an answer of a batch that followed it although nobody said it of that answer."""

    hint_id: str
    gain_nats: float  # the base's log-prob of the answer: with the hint, less without it
    accepted: bool  # whoever asked accepted the answer; False: they rejected it
    sample_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptHint:
    """A held hint that was not in the batch, and how likely the version still finds an answer that followed it."""

    hint_id: str
    lost_nats: float  # per token: the answer's log-prob when it was written, less that by this version


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken(_VersionEvent):
    """An optimizer step was taken and its checkpoint is complete on disk. Losses and log-probs are in nats."""

    num_samples: int
    num_hinted: int
    num_rewarded: int
    num_tokens: int  # trained on
    num_tokens_dropped: int  # not trained on, as a log-prob was missing or not finite
    loss_nats: float | None  # None: no token could be trained on, so the weights stayed as they were
    kl_reference_nats: float | None  # None: nothing was trained on, or the settings ask for no reference
    mean_gap_nats: float | None  # the teacher's log-prob less the old policy's; None: no hint counts
    mean_reward: float | None  # None: no sample has a reward
    clipped_share: float | None  # of tokens; None: nothing can be clipped, as where a batch is one step
    grad_norm: float | None  # before clipping; None: nothing was trained on
    learning_rate: float
    mean_versions_behind: float  # versions published after the newest one that sampled the answer, up to the parent
    max_versions_behind: int
    step_ms: int
    taken_at_ms: int
    entropy_nats: float | None = None  # the policy's, the mean over trained tokens; None: there were no such tokens
    behaviour_kl_nats: float | None = None  # mean of behaviour less old log-prob: how far engine and trainer differ
    mean_response_tokens: float | None = None  # of the answers trained on
    weights_changed_share: float | None = None  # of the published weights; None: no optimizer step was taken
    rehearsed: tuple[Rehearsed, ...] = ()  # the held hints in the batch, one for each answer to one
    followed: tuple[FollowedHint, ...] = ()  # of the answers on which the memory had held hints tried
    kept: tuple[KeptHint, ...] = ()  # of the held hints whose answers the gate scored


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRejected(_VersionEvent):
    """A plan's step would have harmed the policy: there is no such version, and the policy is unchanged."""

    num_samples: int  # of the plan; they are used up
    reason: str
    step_ms: int
    rejected_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPublished(_VersionEvent):
    """The weights of a version lie at `path`, complete, and engines may take them over."""

    parent_version: int | None  # None: the base
    path: str
    adapter: str | None  # of a LoRA adapter, the name by which requests ask for it; None: these are full weights
    manifest_sha256: str | None  # None: the base, which has no manifest
    num_bytes: int
    published_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyActivated(_VersionEvent):
    """An engine serves this version from now on."""

    IDENTITY: ClassVar = ("policy_id", "policy_version", "engine", "activated_at_ms")

    engine: str  # its address
    adapter: str | None  # as in PolicyPublished
    pause_ms: float  # how long the engine sampled no token
    num_bytes: int
    activated_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRejected(_VersionEvent):
    """An engine did not take this version over, and goes on serving the one that it served before."""

    IDENTITY: ClassVar = ("policy_id", "policy_version", "engine", "rejected_at_ms")

    engine: str
    reason: str
    rejected_at_ms: int


_PLUS = "+"  # in no `policy.id`, in no key's name, and in no name that requests' metadata may give


def policy_of_key(policy_id: str, key: str | None) -> str:
    """Return the id of the policy that learns under this key alone: an API key's name, or what `key_of_agent` returns.

    Without a key it is the one that all share, `policy_id`.
    """
    return policy_id if key is None else f"{policy_id}{_PLUS}{key}"


def key_of_agent(key_name: str | None, agent: str) -> str:
    """Return the key of an agent's policy: its name and, where the agent shows an API key, that key's name before it.

    So agents of one name under two API keys have two policies.
    """
    return agent if key_name is None else f"{key_name}{_PLUS}{agent}"


def key_of_policy(policy_id: str) -> str | None:
    """Return the key under which alone this policy learns; None: all share it."""
    return policy_id.partition(_PLUS)[2] or None


def asker_of(policy_id: str, key_name: str | None) -> str | None:
    """Return who asked: the key of the policy that answered, or else the API key; None: nobody knows."""
    return key_of_policy(policy_id) or key_name


def shared_policy(policy_id: str) -> str:
    """Return the id of the policy that all share, and that a key's policy began with."""
    return policy_id.partition(_PLUS)[0]


def is_of_policy(policy_id: str, shared_id: str) -> bool:
    """Return whether this is the policy that all share, or one of a key that began with it."""
    return shared_policy(policy_id) == shared_id


def is_ours(policy_id: str, shared_id: str, *, by_key: bool) -> bool:
    """Return whether engines of `shared_id` serve this policy; with `by_key` they serve keys' policies too."""
    return is_of_policy(policy_id, shared_id) if by_key else policy_id == shared_id
