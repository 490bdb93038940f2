"""Which of the hints offered is kept, or why there is none. Pure."""

from collections.abc import Sequence

from clawstream.events import HintAbsence, VoteCast, VoteStatus

MIN_CHARACTERS = 11


def choose(votes: Sequence[VoteCast], *, quorum: int) -> str | HintAbsence:
    """Return the longest hint that `quorum` votes offered, of equals the first by ballot; or why there is none.

    OpenClaw-RL takes a hint that any vote offers; with three votes wrong once in ten that invents one for every fourth
    answer with nothing to improve.
    """
    readable = [vote for vote in votes if vote.status is VoteStatus.READABLE]
    if not readable:
        unread = any(vote.status is VoteStatus.UNREADABLE for vote in votes)
        return HintAbsence.UNREADABLE if unread else HintAbsence.FAILED
    offered = offers(votes)
    if not offered:
        return HintAbsence.NONE_OFFERED
    if len(offered) < quorum:
        return HintAbsence.OUTVOTED
    longest = max(offered, key=len)
    return longest if len(longest) >= MIN_CHARACTERS else HintAbsence.TOO_SHORT


def offers(votes: Sequence[VoteCast]) -> list[str]:
    """Return the hints of the votes that say there is one, in the order of the ballots."""
    ordered = sorted(votes, key=lambda vote: vote.ballot)
    return [vote.hint.strip() for vote in ordered if vote.score == 1 and vote.hint is not None and vote.hint.strip()]
