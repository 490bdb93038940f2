"""What operators order: replays of the log, the samples a policy is trained on, rollbacks and pinned versions."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from clawstream.events.base import Event, PolicyEvent
from clawstream.events.samples import EVERYTHING, LearnsFrom, RewardWeights


class VotesFrom(StrEnum):
    """Where the votes of a replay come from."""

    LOG = "log"  # the recorded votes are aggregated again
    NEW = "new"  # a judge is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetRange:
    """The records of a partition that are read: from `first_offset` up to, but not including, `end_offset`."""

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
    judge: str | None  # the judge that is asked, or whose votes alone count; None: all votes on the log count
    prompt_version: str | None  # of the judge's prompts; None: no votes are asked for
    session_id: str | None  # the only session that is replayed; None: all are
    num_votes: int  # per question and turn
    quorum: int
    ranges: tuple[OffsetRange, ...]
    started_at_ms: int  # since the epoch, UTC
    reward_weights: RewardWeights
    hint_quorum: int
    teacher: str | None = None  # the engine whose recorded log-probs weigh hints; None: the trainer computes them
    heuristic_function: str | None = None  # scores turns, besides the scores on the log; None: no function is used
    learns: LearnsFrom = EVERYTHING  # what the trainer can use; a session without any of it gets a second look
    judged: bool = True  # False: no judge votes, so that feedback waits for none
    grouped: bool = False  # attempts at one task are weighed against each other, as `stepwise` needs


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEnded(ReplayEvent):
    """All of the replay's output is on its topics."""

    num_exchanges: int
    num_turns: int  # paired
    num_verdicts: int
    num_hints: int  # found
    num_samples: int
    num_refused: int
    num_calls: int  # to the judge, by the last run of the replay alone
    num_unusable: int  # records that were skipped
    samples_sha256: str  # over the sha256 of each sample's bytes, in the order of the samples' ids
    ended_at_ms: int  # since the epoch, UTC
    num_votes_cast: int  # by the judge, over all runs of the replay


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesPromoted(PolicyEvent):
    """From its next batch on the policy is trained on these samples."""

    IDENTITY: ClassVar = ("policy_id", "number")

    number: int  # 1, 2, .. for each policy
    replay: str | None  # the replay whose samples these are; None: they are the live ones
    undoes: int | None  # the number of the promotion that this one takes back; None: it takes back none
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
    """A version's weights are kept for a rollback, however many versions follow; `pinned` False: not any longer."""

    IDENTITY: ClassVar = ("policy_id", "number")

    number: int  # 1, 2, .. for each policy
    policy_version: int
    pinned: bool
    asked_at_ms: int  # since the epoch, UTC


def pinned(events: Iterable[VersionPinned]) -> frozenset[int]:
    """Return the versions of a policy that are pinned; of two events with one number the first counts."""
    first = {event.number: event for event in reversed([*events])}
    newest = {event.policy_version: event.pinned for _, event in sorted(first.items())}
    return frozenset(version for version, is_pinned in newest.items() if is_pinned)


def promotions(events: Iterable[SamplesPromoted]) -> list[SamplesPromoted]:
    """Return the promotions that are in force for a policy, the newest last.

    Of two events with one number the first counts. Without a promotion in force, the live samples are trained on.
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
