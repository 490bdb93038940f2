"""Counts of what events say. Pure.

Tallies add up in any order: the sum of an hour is the sum of its minutes. An average over nothing is None, not 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from clawstream.events import (
    AnswerRefreshed,
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    PolicyActivated,
    PolicyRejected,
    SampleAssembled,
    SampleRefused,
    StepRejected,
    StepTaken,
    TurnOrphaned,
    TurnPaired,
    VerdictReached,
    VoteCast,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventCounts:
    """Counts of what happened in some stretch of time.

    exchanges   "completed", or why an exchange failed -> how many
    votes       the vote's status -> how many
    refusals    why no sample came of a turn or session -> how many
    anew        outcome of prompts that were answered again: "sampled", "unanswered", or why no sample -> how many
    """

    exchanges: Mapping[str, int] = field(default_factory=dict)
    output_tokens: int = 0
    turns_paired: int = 0
    turns_orphaned: int = 0
    votes: Mapping[str, int] = field(default_factory=dict)
    verdicts: int = 0
    verdicts_scored: int = 0
    score_sum: int = 0
    samples: int = 0
    refusals: Mapping[str, int] = field(default_factory=dict)
    anew: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    steps_rejected: int = 0
    activations: int = 0
    rejections: int = 0
    pause_ms_max: float | None = None
    undecodable: int = 0

    def __add__(self, other: "EventCounts") -> "EventCounts":
        return EventCounts(
            exchanges=_summed(self.exchanges, other.exchanges),
            output_tokens=self.output_tokens + other.output_tokens,
            turns_paired=self.turns_paired + other.turns_paired,
            turns_orphaned=self.turns_orphaned + other.turns_orphaned,
            votes=_summed(self.votes, other.votes),
            verdicts=self.verdicts + other.verdicts,
            verdicts_scored=self.verdicts_scored + other.verdicts_scored,
            score_sum=self.score_sum + other.score_sum,
            samples=self.samples + other.samples,
            refusals=_summed(self.refusals, other.refusals),
            anew=_summed(self.anew, other.anew),
            steps=self.steps + other.steps,
            steps_rejected=self.steps_rejected + other.steps_rejected,
            activations=self.activations + other.activations,
            rejections=self.rejections + other.rejections,
            pause_ms_max=_larger(self.pause_ms_max, other.pause_ms_max),
            undecodable=self.undecodable + other.undecodable,
        )

    @property
    def mean_score(self) -> float | None:
        """The mean over the verdicts that have a score; None: there is none."""
        return _share(self.score_sum, self.verdicts_scored)

    @property
    def unreadable_share(self) -> float | None:
        """The share of unreadable votes among the replies that arrived."""
        unreadable = self.votes.get("unreadable", 0)
        return _share(unreadable, unreadable + self.votes.get("readable", 0))

    @property
    def failed_share(self) -> float | None:
        """The share of votes without a reply among all that were asked for."""
        return _share(self.votes.get("failed", 0), sum(self.votes.values()))


NOTHING = EventCounts()
UNDECODABLE = EventCounts(undecodable=1)


def tally(event: Event) -> EventCounts:
    """Return what `event` adds."""
    match event:
        case ExchangeCompleted():
            return EventCounts(exchanges={"completed": 1}, output_tokens=len(event.output_ids))
        case ExchangeFailed():
            return EventCounts(exchanges={event.reason.value: 1}, output_tokens=len(event.output_ids))
        case TurnPaired():
            return EventCounts(turns_paired=1)
        case TurnOrphaned():
            return EventCounts(turns_orphaned=1)
        case VoteCast():
            return EventCounts(votes={event.status.value: 1})
        case VerdictReached(score=None):
            return EventCounts(verdicts=1)
        case VerdictReached(score=int(score)):
            return EventCounts(verdicts=1, verdicts_scored=1, score_sum=score)
        case SampleAssembled(refreshed_id=None):
            return EventCounts(samples=1)
        case SampleRefused(refreshed_id=None):
            return EventCounts(refusals={event.reason.value: 1})
        case SampleAssembled():
            return EventCounts(anew={"sampled": 1})
        case SampleRefused():
            return EventCounts(anew={event.reason.value: 1})
        case AnswerRefreshed(error=str()):
            return EventCounts(anew={"unanswered": 1})
        case StepTaken():
            return EventCounts(steps=1)
        case StepRejected():
            return EventCounts(steps_rejected=1)
        case PolicyActivated():
            return EventCounts(activations=1, pause_ms_max=event.pause_ms)
        case PolicyRejected():
            return EventCounts(rejections=1)
        case _:
            return NOTHING


def _summed(one: Mapping[str, int], other: Mapping[str, int]) -> Mapping[str, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in sorted({*one, *other})}


def _larger(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
