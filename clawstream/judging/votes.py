"""Counts the votes on an answer. Pure.

The one rule: only readable votes count for a score, and a score needs a quorum of them; without it there is none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from clawstream.events import VerdictStatus, VoteCast, VoteStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteTally:
    """How many votes there are of each kind."""

    num_positive: int
    num_neutral: int
    num_negative: int
    num_unreadable: int
    num_failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteOutcome:
    """The outcome of a tally; `score` is None below the quorum."""

    status: VerdictStatus
    score: int | None


def tally(votes: Sequence[VoteCast]) -> VoteTally:
    """Return how many votes there are of each kind."""
    scores = [vote.score for vote in votes if vote.status is VoteStatus.READABLE]
    statuses = [vote.status for vote in votes]
    return VoteTally(
        num_positive=scores.count(1),
        num_neutral=scores.count(0),
        num_negative=scores.count(-1),
        num_unreadable=statuses.count(VoteStatus.UNREADABLE),
        num_failed=statuses.count(VoteStatus.FAILED),
    )


def outcome(counts: VoteTally, *, quorum: int) -> VoteOutcome:
    """Return the score with strictly more votes than any other; 0 for a tie, none below `quorum` readable votes."""
    by_score = {1: counts.num_positive, 0: counts.num_neutral, -1: counts.num_negative}
    if sum(by_score.values()) < quorum:
        return VoteOutcome(status=VerdictStatus.BELOW_QUORUM, score=None)
    most = max(by_score.values())
    ahead = [score for score, num_votes in by_score.items() if num_votes == most]
    if len(ahead) > 1:
        return VoteOutcome(status=VerdictStatus.TIED, score=0)
    return VoteOutcome(status=VerdictStatus.DECIDED, score=ahead[0])
