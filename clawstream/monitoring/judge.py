"""How the judge fares: when it was last asked, and why it does not answer. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from clawstream.events import VoteCast, VoteStatus
from clawstream.stream.stage import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReachability:
    """How the judge fared at one moment, as seen by a process that asked it."""

    judge: str
    error: str | None  # why it does not answer; None: it does
    since_ms: int  # since when that is so, since the epoch, UTC
    heard_ms: int  # when it was last asked, with this outcome


def by_votes(votes: Iterable[Record], judge: str) -> JudgeReachability | None:
    """Return how `judge` fares by its newest votes, given in any order; None: none of the votes is its own.

    A question that is still being retried has no vote yet.
    """
    found: JudgeReachability | None = None
    for record in sorted(votes, key=lambda record: record.timestamp_ms):
        if isinstance(record.event, VoteCast) and record.event.judge == judge:
            failed = record.event.status is VoteStatus.FAILED
            error = (record.event.error or "no reply") if failed else None
            found = after(found, judge, error, record.timestamp_ms)
    return found


def after(before: JudgeReachability | None, judge: str, error: str | None, at_ms: int) -> JudgeReachability:
    """Return how the judge fares after it was asked at `at_ms`; `error` says why no answer came, None: one did."""
    goes_on = before is not None and before.judge == judge and (before.error is None) is (error is None)
    since_ms = before.since_ms if goes_on and before is not None else at_ms
    return JudgeReachability(judge=judge, error=error, since_ms=since_ms, heard_ms=at_ms)


def newest(*known: JudgeReachability | None, judge: str) -> JudgeReachability | None:
    """Return the latest that is known of `judge`; None: nothing is."""
    mine = [one for one in known if one is not None and one.judge == judge]
    return max(mine, key=lambda one: one.heard_ms, default=None)
