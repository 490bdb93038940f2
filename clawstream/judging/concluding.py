"""The conclusion of the votes on a turn, whoever cast them. Pure.

The one rule: only the vote that completes a question's ballots concludes the question. So the same votes give the same
conclusion, in any order and however often they are read.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from clawstream.events import (
    Event,
    HintAbsence,
    HintAbsent,
    HintFound,
    Question,
    VerdictReached,
    VoteCast,
)
from clawstream.judging.hints import choose, offers
from clawstream.judging.votes import outcome, tally


class JudgeVoteKey(NamedTuple):
    """The key of one judge's votes on one question."""

    judge: str
    prompt_version: str
    turn_id: str
    question: Question
    revision: int


Cast = Mapping[JudgeVoteKey, Mapping[int, VoteCast]]  # of a session, by ballot


class CountedVotes(NamedTuple):
    """A session's votes after one more, and their conclusions."""

    cast: Cast
    events: list[Event]


def count(cast: Cast, vote: VoteCast, *, num_votes: int, quorum: int, hint_quorum: int) -> CountedVotes:
    """Return the votes with `vote` added, and any conclusion; of two votes on one ballot the first counts."""
    asked = JudgeVoteKey(vote.judge, vote.prompt_version, vote.turn_id, vote.question, vote.revision)
    known = cast.get(asked, {})
    if vote.ballot in known:
        return CountedVotes(cast, [])
    votes = MappingProxyType({**known, vote.ballot: vote})
    events = conclusions(votes, vote, num_votes=num_votes, quorum=quorum, hint_quorum=hint_quorum)
    return CountedVotes(MappingProxyType({**cast, asked: votes}), events)


def conclusions(
    cast: Mapping[int, VoteCast], vote: VoteCast, *, num_votes: int, quorum: int, hint_quorum: int
) -> list[Event]:
    """Return the conclusion of the votes on a question if `vote` was the last one missing."""
    if vote.ballot >= num_votes or len(cast) < num_votes or any(number not in cast for number in range(num_votes)):
        return []
    votes = [cast[number] for number in range(num_votes)]
    return [_verdict(votes, quorum) if vote.question is Question.SCORE else _hint(votes, hint_quorum)]


def _verdict(votes: list[VoteCast], quorum: int) -> VerdictReached:
    first, counts = votes[0], tally(votes)
    result = outcome(counts, quorum=quorum)
    return VerdictReached(
        session_id=first.session_id,
        turn_id=first.turn_id,
        judge=first.judge,
        prompt_version=first.prompt_version,
        revision=first.revision,
        status=result.status,
        score=result.score,
        num_positive=counts.num_positive,
        num_neutral=counts.num_neutral,
        num_negative=counts.num_negative,
        num_unreadable=counts.num_unreadable,
        num_failed=counts.num_failed,
    )


def _hint(votes: list[VoteCast], quorum: int) -> HintFound | HintAbsent:
    first, chosen = votes[0], choose(votes, quorum=quorum)
    if isinstance(chosen, HintAbsence):
        return HintAbsent(
            session_id=first.session_id,
            turn_id=first.turn_id,
            judge=first.judge,
            prompt_version=first.prompt_version,
            revision=first.revision,
            reason=chosen,
            num_offered=len(offers(votes)),
        )
    return HintFound(
        session_id=first.session_id,
        turn_id=first.turn_id,
        judge=first.judge,
        prompt_version=first.prompt_version,
        revision=first.revision,
        hint=chosen,
        num_offered=len(offers(votes)),
    )
