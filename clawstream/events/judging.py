"""Votes, verdicts, hints, teachers' scores and feedback: what models and people said of a turn.

Revision 0 is the ordinary look at a turn. Revision 1 is a second look, at one turn of a session that gave no sample:
the rule that asks for it is "the floor".
"""

import re
import struct
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import ClassVar

from clawstream.events.base import LogProbs, SessionEvent, TokenIds, derived_id

MIN_HINT_CHARACTERS = 11
MAX_OTHER_HINTS = 2  # beside the longest; each costs a pass of the teacher over the answer
_UNRENDERABLE = re.compile("[\x00\ud800-\udfff]")


class Question(StrEnum):
    """What a judge was asked."""

    SCORE = "score"  # how good was the answer, going by the next state: -1, 0 or 1
    HINT = "hint"  # does the next state say how to answer better: -1: no; 1: yes, and the vote says how


class VoteStatus(StrEnum):
    """What came of one question to one judge."""

    READABLE = "readable"
    UNREADABLE = "unreadable"  # a reply arrived without a readable verdict
    FAILED = "failed"  # no reply arrived before the deadline, or the judge refused the request


class VerdictStatus(StrEnum):
    """How a verdict came about."""

    DECIDED = "decided"  # one score has strictly more votes than any other
    TIED = "tied"  # the score is 0
    BELOW_QUORUM = "below_quorum"  # too few readable votes; there is no score


class HintAbsence(StrEnum):
    """Why a turn has no hint."""

    NONE_OFFERED = "none_offered"  # no readable vote offers a hint
    OUTVOTED = "outvoted"  # fewer votes than needed offered a hint
    TOO_SHORT = "too_short"  # hints were offered, but none is longer than ten characters
    UNREADABLE = "unreadable"  # no vote could be read
    FAILED = "failed"  # no judge answered


class TeacherStatus(StrEnum):
    """What came of asking a teacher."""

    SCORED = "scored"
    REFUSED = "refused"  # an engine will not score the answer, however often it is asked: one too long, for example
    FAILED = "failed"  # no teacher answered before the deadline, or each policy engine changed its version meanwhile


class FeedbackSource(StrEnum):
    """Who gave feedback."""

    PERSON = "person"
    ENVIRONMENT = "environment"
    HEURISTIC = "heuristic"


CUT = "its reply was cut at judge.max_tokens ="  # begins the error of a vote without a verdict, before the number


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteCast(SessionEvent):
    """One judge's reply to one question about one turn, readable or not, or the fact that no reply came."""

    turn_id: str
    question: Question
    judge: str  # model and endpoint, such as "qwen3-8b@judge.internal:30001"
    prompt_version: str
    revision: int
    ballot: int  # 0, 1, .. up to one less than the votes that this judge is asked for
    status: VoteStatus
    score: int | None  # None: no readable score, which is not a score of 0
    hint: str | None  # None unless the question was for a hint and the vote gives one
    text: str | None  # the judge's reply; None: no reply came
    error: str | None  # why no reply came, or why it was not read; None: it was read, with a verdict or without
    prompt_tokens: int | None  # as the endpoint counted; None: not reported
    completion_tokens: int | None
    latency_ms: int
    cast_at_ms: int  # since the epoch, UTC

    @property
    def event_id(self) -> str:
        """One per ballot. A failed vote has an id of its own, so that a later vote of the same ballot counts too."""
        ballot = (self.turn_id, self.question, self.judge, self.prompt_version, self.revision, self.ballot)
        parts = (*map(str, ballot), self.cast_at_ms) if self.status is VoteStatus.FAILED else tuple(map(str, ballot))
        return derived_id("VoteCast", *parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TurnJudged(SessionEvent):
    """The outcome of one question to one judge about a turn."""

    IDENTITY: ClassVar = ("turn_id", "judge", "prompt_version", "revision")

    turn_id: str
    judge: str
    prompt_version: str
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictReached(_TurnJudged):
    """The outcome of the votes on a turn."""

    status: VerdictStatus
    score: int | None  # -1, 0 or 1; None below the quorum
    num_positive: int
    num_neutral: int
    num_negative: int
    num_unreadable: int
    num_failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherHint:
    """A hint that a vote offers, in other words than the longest one."""

    hint: str  # stripped, longer than 10 characters
    ballot: int  # the first to offer it


@dataclass(frozen=True, slots=True, kw_only=True)
class HintFound(_TurnJudged):
    """How the answer should have been, by the next state: the longest of the hints that the votes offer."""

    hint: str  # stripped, longer than 10 characters
    num_offered: int
    others: tuple[OtherHint, ...] = ()  # the next longest, at most MAX_OTHER_HINTS


@dataclass(frozen=True, slots=True, kw_only=True)
class HintAbsent(_TurnJudged):
    """The reason why a turn's next state gave no hint."""

    reason: HintAbsence
    num_offered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScored(_TurnJudged):
    """Two engines' log-probs of the answer that a judge's hint is about, token by token, or why there are none.

    The teacher's prompt has the hint. The student is the policy, and its prompt has no hint. Engines compute both at
    temperature 1, so the difference comes from the hint and the weights, not from arithmetic.
    """

    teacher: str  # model and endpoint, such as "qwen3-32b@teacher.internal:30000"
    scored_sha256: str  # `sha256_of` the token ids of hinted prompt, prompt and response
    policy_id: str
    status: TeacherStatus
    teacher_logprobs: LogProbs | None  # one per response id; None unless scored
    student_logprobs: LogProbs | None
    student_version: int | None  # the policy version that computed all student log-probs
    error: str | None  # why there are no scores; None exactly when scored
    latency_ms: int
    scored_at_ms: int  # since the epoch, UTC

    @property
    def scoring_id(self) -> str:
        """The id of what is to be scored and by whom, the same whatever the outcome."""
        asked = (self.turn_id, self.judge, self.prompt_version, self.revision)
        return scoring_id_of(*asked, teacher=self.teacher, scored_sha256=self.scored_sha256)

    @property
    def event_id(self) -> str:
        """One per scoring; without scores, one per try, so that a later try which gets scores counts too."""
        if self.status is TeacherStatus.SCORED:
            return self.scoring_id
        return derived_id("TeacherScored", self.scoring_id, self.scored_at_ms)


def scoring_id_of(
    turn_id: str, judge: str, prompt_version: str, revision: int, *, teacher: str, scored_sha256: str
) -> str:
    """Return the id of what a teacher is asked about a judge's hint."""
    return derived_id("TeacherScored", turn_id, judge, prompt_version, revision, teacher, scored_sha256)


def sha256_of(*token_ids: TokenIds) -> str:
    """Return the hash of several sequences of token ids; the same ids split into other sequences have another hash."""
    digest = sha256()
    for ids in token_ids:
        digest.update(struct.pack(f"<q{len(ids)}i", len(ids), *ids))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackGiven(SessionEvent):
    """What somebody said of an answer outside the conversation: a thumb, a text, an outcome."""

    IDENTITY: ClassVar = ("feedback_id",)

    feedback_id: str
    turn_id: str
    key_name: str | None  # the name of the API key that the request had; None: the gateway asks for no keys
    source: FeedbackSource
    score: float | None  # -1 to 1; None: words only
    text: str | None
    given_at_ms: int  # since the epoch, UTC

    @property
    def hint(self) -> str | None:
        """A person's words on how the answer should have been; None: there are none.

        Words beside a score above 0 are praise, and a few characters are no more than another thumb.
        """
        if self.source is not FeedbackSource.PERSON or self.text is None or (self.score or 0) > 0:
            return None
        words = _UNRENDERABLE.sub("\ufffd", self.text).strip()
        return words if len(words) >= MIN_HINT_CHARACTERS else None
