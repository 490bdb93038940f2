"""The judging stage: turns -> votes, verdicts, hints.

The one rule: a ballot ends in exactly one kind of vote. A reply that arrived is readable or unreadable. A missing reply
is asked for again until the deadline, and only then recorded as failed.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from clawstream.config import JudgeSettings
from clawstream.errors import TryLater
from clawstream.events import Event, VoteCast, VoteStatus
from clawstream.inference.judge_client import (
    CALL_TIMEOUT_S,
    CALLS_AT_ONCE,
    DEADLINE_S,
    JudgeRefused,
    JudgeReply,
)
from clawstream.judging.asking import Ballot, Judging, JudgingState, observe
from clawstream.judging.prompts import PROMPT_VERSION
from clawstream.judging.votes import Cast, count, read
from clawstream.stream import topics
from clawstream.stream.stage import Record, Stage, Step

READS = (topics.EXCHANGES, topics.TURNS, topics.VOTES, topics.VERDICTS, topics.HINTS)


class Judge(Protocol):
    """The judge model that is asked."""

    name: str

    async def ask(self, system: str, user: str, *, seed: int) -> JudgeReply:
        """The reply; raises TryLater or JudgeRefused."""


def judging_stage(
    settings: JudgeSettings,
    judge: Judge,
    *,
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    heard: Callable[[str | None], None] = lambda _: None,
) -> Stage[JudgingState, Ballot]:
    """Return the stage that puts turns to `judge` and concludes from its votes.

    `heard` is told after each request why no reply came; None: one came.
    """
    judging = Judging(
        judge=judge.name,
        prompt_version=PROMPT_VERSION,
        num_votes=settings.votes,
        quorum=settings.needed,
        hint_quorum=settings.needed_for_a_hint,
    )
    caller = _JudgeCaller(judge, now_ms, heard)

    def step(session: JudgingState | None, record: Record) -> Step[JudgingState, Ballot]:
        return Step(*observe(session, record.event, judging))

    return Stage(
        name="judging",
        reads=READS,
        step=step,
        perform=caller.cast,
        give_up=caller.give_up,
        calls_at_once=CALLS_AT_ONCE,
        call_timeout_s=CALL_TIMEOUT_S,
        deadline_s=DEADLINE_S,
    )


def aggregation(settings: JudgeSettings, only: str | None = None) -> Stage[Cast, None]:
    """Return the stage that concludes from the votes on the log, or from those of the judge `only`; it asks nobody.

    Each judge's votes are counted apart. It reads the other topics so that votes are kept as long as they are live.
    """

    def step(cast: Cast | None, record: Record) -> Step[Cast, None]:
        vote = record.event
        if not isinstance(vote, VoteCast) or only not in (None, vote.judge):
            return Step(cast)
        counted = count(
            cast or {}, vote, num_votes=settings.votes, quorum=settings.needed,
            hint_quorum=settings.needed_for_a_hint,
        )  # fmt: skip
        return Step(counted.cast, counted.events)

    return Stage(name="judging", reads=READS, step=step)


class _JudgeCaller:
    """Turns ballots into votes."""

    def __init__(self, judge: Judge, now_ms: Callable[[], int], heard: Callable[[str | None], None]) -> None:
        self._judge = judge
        self._now_ms = now_ms
        self._heard = heard
        self._deadline_ms = int(DEADLINE_S * 1000)

    async def cast(self, ballot: Ballot) -> Sequence[Event]:
        """Ask the judge. Raises TryLater where no reply arrived."""
        started_ms = self._now_ms()
        try:
            reply = await self._judge.ask(ballot.prompt.system, ballot.prompt.user, seed=ballot.seed)
        except JudgeRefused as error:
            self._heard(str(error))
            return [self._failed(ballot, str(error), self._now_ms() - started_ms)]
        except TryLater as error:
            self._heard(str(error))
            raise
        self._heard(reply.unusable)
        reading = None if reply.unusable is not None else read(ballot.question, reply.text)
        return [
            self._vote(
                ballot,
                status=VoteStatus.UNREADABLE if reading is None else VoteStatus.READABLE,
                score=None if reading is None else reading.score,
                hint=None if reading is None else reading.hint,
                reply=reply,
                error=reply.unusable,
                latency_ms=self._now_ms() - started_ms,
            )
        ]

    def give_up(self, ballot: Ballot, why: str) -> Sequence[Event]:
        """Return the vote of a judge that did not reply before the deadline."""
        return [self._failed(ballot, why, self._deadline_ms)]

    def _failed(self, ballot: Ballot, why: str, latency_ms: int) -> VoteCast:
        return self._vote(ballot, status=VoteStatus.FAILED, error=why, latency_ms=latency_ms)

    def _vote(
        self,
        ballot: Ballot,
        *,
        status: VoteStatus,
        latency_ms: int,
        score: int | None = None,
        hint: str | None = None,
        reply: JudgeReply | None = None,
        error: str | None = None,
    ) -> VoteCast:
        return VoteCast(
            session_id=ballot.session_id,
            turn_id=ballot.turn_id,
            question=ballot.question,
            judge=self._judge.name,
            prompt_version=PROMPT_VERSION,
            revision=ballot.revision,
            ballot=ballot.number,
            status=status,
            score=score,
            hint=hint,
            text=None if reply is None else reply.text,
            error=error,
            prompt_tokens=None if reply is None else reply.prompt_tokens,
            completion_tokens=None if reply is None else reply.completion_tokens,
            latency_ms=latency_ms,
            cast_at_ms=self._now_ms(),
        )
