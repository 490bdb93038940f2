"""How the judge fares: when it was last heard of, and why it does not answer. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from clawstream.events import VoteCast, VoteStatus
from clawstream.stream.stage import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReachability:
    """The judge at one moment, as somebody who asked it knew it."""

    judge: str
    error: str | None  # why it does not answer; None: it does
    since_ms: int  # since when that is so, since the epoch, UTC
    heard_ms: int  # when it was asked last, and this came of it


def by_votes(votes: Iterable[Record], judge: str) -> JudgeReachability | None:
    """Return how a judge fares by its newest votes, in any order; None: there is none of its own among them.

    What was put to it and is still asked for again is no vote yet.
    """
    found: JudgeReachability | None = None
    for record in sorted(votes, key=lambda record: record.timestamp_ms):
        if isinstance(record.event, VoteCast) and record.event.judge == judge:
            failed = record.event.status is VoteStatus.FAILED
            error = (record.event.error or "no reply") if failed else None
            found = after(found, judge, error, record.timestamp_ms)
    return found


def after(before: JudgeReachability | None, judge: str, error: str | None, at_ms: int) -> JudgeReachability:
    """Return how the judge fares once it was asked again at `at_ms`, and `error` or an answer came of it."""
    goes_on = before is not None and before.judge == judge and (before.error is None) is (error is None)
    since_ms = before.since_ms if goes_on and before is not None else at_ms
    return JudgeReachability(judge=judge, error=error, since_ms=since_ms, heard_ms=at_ms)


def newest(*known: JudgeReachability | None, judge: str) -> JudgeReachability | None:
    """Return what is known last of the judge; None: nothing is."""
    mine = [one for one in known if one is not None and one.judge == judge]
    return max(mine, key=lambda one: one.heard_ms, default=None)
