"""The life of a policy, and what operators order: batches, steps, versions, rollbacks, pins, replays.

Version 0 is the base; the n-th plan names version n. A number is used once: that of a rejected step is never published
or planned again, and the next version's parent is the version before the rejected one. So each plan ends in StepTaken
with PolicyPublished, or in StepRejected; both use up its samples. A sample's age in versions counts published versions
alone; older StepTaken records count rejected ones too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from clawstream.events.base import Event, PolicyEvent
from clawstream.events.samples import OffDistribution, RewardWeights


class VotesFrom(StrEnum):
    """Where a replay has its votes from."""

    LOG = "log"  # the recorded votes are aggregated again
    NEW = "new"  # a judge is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetRange:
    """The records of a partition that are read: from the first offset up to and without the end."""

    topic: str
    partition: int
    first_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEvent(Event):
    """A fact about one replay."""

    IDENTITY: ClassVar = ("replay",)

    replay: str  # its name

    @property
    def key(self) -> str:
        """The replay."""
        return self.replay


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStarted(ReplayEvent):
    """What a replay reads and how it judges. This event, the log and any new votes determine all of its output."""

    votes_from: VotesFrom
    judge: str | None  # who is asked, or the only judge whose votes count; None: all votes on the log count
    prompt_version: str | None  # of the judge's prompts; None: no votes are asked for
    session_id: str | None  # None: all
    num_votes: int  # per question and turn
    quorum: int
    ranges: tuple[OffsetRange, ...]
    started_at_ms: int  # since the epoch, UTC
    off_distribution: OffDistribution | None = None  # None: off-distribution answers are samples
    reward_weights: RewardWeights | None = None  # None: it began before feedback counted
    hint_quorum: int | None = None  # None: it began when one vote's hint was enough
    teacher: str | None = None  # the engine whose recorded scores weigh hints; None: the trainer's own do
    heuristic_function: str | None = None  # scores turns besides the log's scores; None: none is used


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEnded(ReplayEvent):
    """All of the replay's output is on its topics."""

    num_exchanges: int
    num_turns: int  # paired
    num_verdicts: int
    num_hints: int  # found
    num_samples: int
    num_refused: int
    num_calls: int  # to the judge, by the run that ended it
    num_unusable: int  # records that were skipped
    samples_sha256: str  # over the sha256 of each sample's bytes, in the order of the samples' ids
    ended_at_ms: int  # since the epoch, UTC
    num_votes_cast: int | None  # by the judge, over all of its runs; None: it ended before votes were counted


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesPromoted(PolicyEvent):
    """From its next batch on the policy is trained on these samples."""

    IDENTITY: ClassVar = ("policy_id", "number")

    number: int  # 1, 2, .. for each policy
    replay: str | None  # whose samples; None: the live ones
    undoes: int | None  # the number of the promotion rolled back; None: this is no rollback
    promoted_at_ms: int  # since the epoch, UTC


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackAsked(PolicyEvent):
    """The policy is to return to an earlier version: its trainer's next version has that version's weights."""

    IDENTITY: ClassVar = ("policy_id", "number")

    number: int  # 1, 2, .. for each policy
    to_version: int
    asked_at_ms: int  # since the epoch, UTC


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPinned(PolicyEvent):
    """A version's weights are kept for a rollback, however many versions follow; not `pinned`: no longer."""

    IDENTITY: ClassVar = ("policy_id", "number")

    number: int  # 1, 2, .. for each policy
    policy_version: int
    pinned: bool
    asked_at_ms: int  # since the epoch, UTC


def pinned(events: Iterable[VersionPinned]) -> frozenset[int]:
    """Return the versions of a policy that are pinned; of two events with one number the first counts."""
    first: dict[int, VersionPinned] = {}
    for event in events:
        first.setdefault(event.number, event)
    newest = {event.policy_version: event.pinned for _, event in sorted(first.items())}
    return frozenset(version for version, is_pinned in newest.items() if is_pinned)


def promotions(events: Iterable[SamplesPromoted]) -> list[SamplesPromoted]:
    """Return the promotions in force for a policy, the newest last.

    Of two events with one number the first counts. Where none is in force, the live samples are used.
    """
    first: dict[int, SamplesPromoted] = {}
    for event in events:
        first.setdefault(event.number, event)
    standing: list[SamplesPromoted] = []
    for event in first.values():
        if event.undoes is None:
            standing.append(event)
        else:
            standing = [other for other in standing if other.number != event.undoes]
    return standing


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseNamed(PolicyEvent):
    """A part that found no base named names its own. The first of each hash on the log counts; no other is accepted.

    A part that has no weights at hand names the tokenizer alone.
    """

    IDENTITY: ClassVar = ("policy_id", "path", "model_sha256", "tokenizer_sha256", "named_at_ms")

    path: str  # of the base's folder at that time
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
    """The turn of a planned sample, and who judged it; no other revision of that turn is ever planned."""

    turn_id: str  # or the id of a refreshed answer, which counts as a turn of its own
    judge: str
    prompt_version: str
    revision: int | None = None  # of the planned sample; None: not recorded
    num_feedback: int | None = None  # that the sample knows; None: none, or not recorded


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
    rollback: int | None = None  # the number of the rollback that it carries out, without samples; None: no rollback
    turns: tuple[PlannedTurn, ...] | None = None  # of the samples, in their order; None: not said
    advantages: tuple[float, ...] | None = None  # of the samples, in their order; None: computed from the rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken(PolicyEvent):
    """An optimizer step was taken and its checkpoint is whole on disk. Losses and log-probs in nats."""

    IDENTITY: ClassVar = ("policy_id", "policy_version")

    policy_version: int
    num_samples: int
    num_hinted: int
    num_rewarded: int
    num_tokens: int  # trained
    num_tokens_dropped: int  # not trained: a log-prob was missing or not finite
    loss_nats: float | None  # None: no token could be trained on, so the weights stayed
    kl_reference_nats: float | None  # None: nothing was trained on, or no reference was asked for
    mean_gap_nats: float | None  # teacher - old; None: no hint counts by it
    mean_reward: float | None  # None: no sample has a reward
    clipped_share: float | None  # None: nothing can be clipped, as with one step a batch
    grad_norm: float | None  # before clipping; None: nothing was trained on
    learning_rate: float
    mean_versions_behind: float  # versions published after the samples' newest sampling version, up to the parent
    max_versions_behind: int
    step_ms: int
    taken_at_ms: int
    entropy_nats: float | None = None  # the policy's mean over trained tokens; None: none was, or not recorded
    behaviour_kl_nats: float | None = None  # sampled - old, a token: how far the engine's policy was from the trainer's
    mean_response_tokens: float | None = None  # of the answers trained on
    weights_changed_share: float | None = None  # of the published numbers; None: no step was taken, or not said


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRejected(PolicyEvent):
    """A plan's step would have harmed the policy: its version does not exist, and the policy is unchanged."""

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
    """An engine did not take this version over, and keeps serving what it served."""

    IDENTITY: ClassVar = ("policy_id", "policy_version", "engine", "rejected_at_ms")

    policy_version: int
    engine: str
    reason: str
    rejected_at_ms: int
