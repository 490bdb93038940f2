"""From a judge's reply to the conclusion of the votes on a turn. Pure.

Only the last box after any thinking counts. A reply without a box that the question allows is unreadable, which is not
a score of 0. A score needs a quorum of readable votes. The vote that completes a question's ballots concludes it, so
the same votes give the same conclusion in any order and however often they are read.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clawstream.conversation.floor import with_entry
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
    _, thought, answer = text.rpartition("</think>")
    if not thought and "<think>" in answer:
        return None  # its thinking never ended
    boxes = _BOX.findall(answer)
    score = _SCORES.get(boxes[-1].strip().replace("\u2212", "-")) if boxes else None
    if score is None or score not in _ALLOWED[question]:
        return None
    hints = _HINT.findall(answer) if question is Question.HINT and score == 1 else []
    return VoteReading(score=score, hint=hints[-1].strip() or None if hints else None)


def outcome(scores: Sequence[int | None], *, quorum: int) -> tuple[VerdictStatus, int | None]:
    """Return the score of strictly more readable votes than any other; 0 for a tie, none for fewer than `quorum`."""
    if len(scores) < quorum:
        return VerdictStatus.BELOW_QUORUM, None
    (ahead, most), *others = Counter(scores).most_common()
    if any(num_votes == most for _, num_votes in others):
        return VerdictStatus.TIED, 0
    return VerdictStatus.DECIDED, ahead


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


class VoteKey(NamedTuple):
    """The key of one judge's votes on one question about one turn."""

    judge: str
    prompt_version: str
    turn_id: str
    question: Question
    revision: int


Cast = Mapping[VoteKey, Mapping[int, VoteCast]]  # of a session, by ballot


@dataclass(frozen=True, slots=True, kw_only=True)
class VotingRules:
    """How many votes a question gets, and how many must be readable for a score and offer a hint."""

    num_votes: int
    quorum: int
    hint_quorum: int


def count(cast: Cast, vote: VoteCast, rules: VotingRules) -> tuple[Cast, list[Event]]:
    """Return the votes with `vote` added, and any conclusion; of two votes on one ballot the first counts."""
    asked = VoteKey(vote.judge, vote.prompt_version, vote.turn_id, vote.question, vote.revision)
    known = cast.get(asked, {})
    if vote.ballot in known:
        return cast, []
    votes = with_entry(known, vote.ballot, vote)
    return with_entry(cast, asked, votes), conclusions(votes, vote, rules)


def conclusions(cast: Mapping[int, VoteCast], vote: VoteCast, rules: VotingRules) -> list[Event]:
    """Return the conclusion of the votes on a question if `vote` was the last one missing."""
    votes = [cast[number] for number in range(rules.num_votes) if number in cast]
    if vote.ballot >= rules.num_votes or len(votes) < rules.num_votes:
        return []
    if vote.question is Question.SCORE:
        return [_verdict(votes, rules.quorum)]
    return [_hint(votes, rules.hint_quorum)]


def _verdict(votes: list[VoteCast], quorum: int) -> VerdictReached:
    scores = [vote.score for vote in votes if vote.status is VoteStatus.READABLE]
    statuses = [vote.status for vote in votes]
    status, score = outcome(scores, quorum=quorum)
    return VerdictReached(
        **_identity(votes[0]),
        status=status,
        score=score,
        num_positive=scores.count(1),
        num_neutral=scores.count(0),
        num_negative=scores.count(-1),
        num_unreadable=statuses.count(VoteStatus.UNREADABLE),
        num_failed=statuses.count(VoteStatus.FAILED),
    )


def _hint(votes: list[VoteCast], quorum: int) -> HintFound | HintAbsent:
    chosen, num_offered = choose(votes, quorum=quorum), len(offers(votes))
    if isinstance(chosen, HintAbsence):
        return HintAbsent(**_identity(votes[0]), reason=chosen, num_offered=num_offered)
    return HintFound(**_identity(votes[0]), hint=chosen, num_offered=num_offered)


def _identity(vote: VoteCast) -> dict[str, Any]:
    """Return the fields that a conclusion shares with its votes."""
    shared = ("session_id", "turn_id", "judge", "prompt_version", "revision")
    return {name: getattr(vote, name) for name in shared}
