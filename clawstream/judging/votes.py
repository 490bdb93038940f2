"""From a judge's reply to the conclusion of the votes on a turn. Pure.

Only the last box after any thinking counts. A reply without a box that the question allows is unreadable,
which is not a score of 0.

Only readable votes count for a score, and a score needs a quorum of them; without it there is none.

Only the vote that completes a question's ballots concludes the question. So the same votes give the same
conclusion, in any order and however often they are read.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from clawstream.events import (
    Event,
    HintAbsence,
    HintAbsent,
    HintFound,
    Question,
    VerdictReached,
    VerdictStatus,
    VoteCast,
    VoteStatus,
)

_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_HINT = re.compile(r"\[HINT_START\](.*?)\[HINT_END\]", re.DOTALL)
_ALLOWED = {Question.SCORE: {-1, 0, 1}, Question.HINT: {-1, 1}}
_SCORES = {"-1": -1, "0": 0, "1": 1, "+1": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteReading:
    """A readable vote; `hint` is None unless the vote was asked for one and gives it."""

    score: int
    hint: str | None


def read(question: Question, text: str) -> VoteReading | None:
    """Return what `text` says to `question`; None where it can't be read."""
    answer = _after_thinking(text)
    boxes = _BOX.findall(answer)
    score = _SCORES.get(boxes[-1].strip().replace("\u2212", "-")) if boxes else None
    if score is None or score not in _ALLOWED[question]:
        return None
    return VoteReading(score=score, hint=_last_hint(answer) if question is Question.HINT and score == 1 else None)


def _after_thinking(text: str) -> str:
    """Return the text after the thinking; "" where the thinking never ended, since it holds no verdict."""
    _, ended, after = text.rpartition("</think>")
    if ended:
        return after
    return "" if "<think>" in text else text


def _last_hint(answer: str) -> str | None:
    offered = [block.strip() for block in _HINT.findall(answer)]
    return offered[-1] if offered and offered[-1] else None


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
    return [_verdict(votes, quorum) if vote.question is Question.SCORE else _concluded_hint(votes, hint_quorum)]


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


def _concluded_hint(votes: list[VoteCast], quorum: int) -> HintFound | HintAbsent:
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
