"""The judging stage and the heuristics stage: who or what says how good a turn was.

The judging stage reads turns, asks a judge, and writes votes, verdicts and hints. The one rule: every ballot ends in
one vote, which is readable, unreadable or failed. A reply that arrived gives a readable or an unreadable vote. Without
a reply the judge is asked again, until the deadline or until it refuses the request: then the vote is failed.

The heuristics stage scores turns, as feedback, by a function that an installed package brings. The function is an entry
point of the group `clawstream.heuristics`, and the log records it by its name there. A function that scores differently
from now on must take another name.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Protocol

from clawstream.config import JudgeSettings
from clawstream.errors import ConfigError, TryLater
from clawstream.events import CUT, EVERYTHING, Event, LearnsFrom, Question, VoteCast, VoteStatus
from clawstream.inference.judge_client import CALLS_AT_ONCE, JudgeClient, JudgeRefused, JudgeReply
from clawstream.inference.reward_model import RewardModel
from clawstream.judging import heuristics
from clawstream.judging.heuristics import DueTurn, Heuristic, Watched, feedback
from clawstream.judging.prompts import PROMPT_VERSION
from clawstream.judging.votes import (
    Ballot,
    Cast,
    Judging,
    JudgingState,
    VoteReading,
    VotingRules,
    count,
    observe,
    rating,
    read,
)
from clawstream.stream import topics
from clawstream.stream.stage import Record, Stage, Step

READS = (topics.EXCHANGES, topics.TURNS, topics.VOTES, topics.VERDICTS, topics.HINTS)
HEURISTICS_READ = (topics.EXCHANGES, topics.TURNS)
ENTRY_POINTS = "clawstream.heuristics"  # the group of heuristics


class ChatJudge(Protocol):
    """A judge that is asked in words."""

    name: str

    async def ask(self, system: str, user: str, *, seed: int) -> JudgeReply:
        """The reply; raises TryLater or JudgeRefused."""


Judge = ChatJudge | RewardModel


@asynccontextmanager
async def judge_at(settings: JudgeSettings) -> AsyncIterator[Judge]:
    """Yield the client of the judge that is set, for the length of the block. Raises ConfigError where none is."""
    opened = JudgeClient.open(settings) if settings.reward_above is None else RewardModel.open(settings)
    async with opened as judge:
        yield judge


def judging_stage(
    settings: JudgeSettings,
    judge: Judge,
    *,
    learns: LearnsFrom = EVERYTHING,
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    heard: Callable[[str | None], None] = lambda _: None,
) -> Stage[JudgingState, Ballot]:
    """Return the stage that asks `judge` about turns and concludes from its votes.

    `learns` is what the trainer can use: a session without any of it gets a second look. `heard` is called after each
    request to the judge, with the reason why no usable reply came, or with None if one came.
    """
    judging = Judging(
        judge=judge.name, prompt_version=PROMPT_VERSION, rules=_rules(settings), learns=learns,
        rates=isinstance(judge, RewardModel),
    )  # fmt: skip
    caller = _JudgeCaller(judge, settings, now_ms, heard)
    return Stage(
        name="judging",
        reads=READS,
        step=lambda session, record: observe(session, record.event, judging),
        perform=caller.cast,
        give_up=caller.give_up,
        calls_at_once=CALLS_AT_ONCE,
        call_timeout_s=settings.call_timeout_s,
        deadline_s=settings.deadline_s,
    )


def aggregation(settings: JudgeSettings, only: str | None = None) -> Stage[Cast, None]:
    """Return the stage that asks no judge and concludes from the votes on the log, of all judges or of `only` one.

    Each judge's votes are counted separately. The other topics are read only so that this stage keeps a session's votes
    as long as the live stage does.
    """
    rules = _rules(settings)

    def step(cast: Cast | None, record: Record) -> Step[Cast, None]:
        vote = record.event
        if not isinstance(vote, VoteCast) or only not in (None, vote.judge):
            return Step(cast)
        return Step(*count(cast or {}, vote, rules))

    return Stage(name="judging", reads=READS, step=step)


def _rules(settings: JudgeSettings) -> VotingRules:
    return VotingRules(num_votes=settings.num_votes, quorum=settings.needed, hint_quorum=settings.needed_for_a_hint)


@dataclass(frozen=True, slots=True)
class _JudgeCaller:
    """Turns ballots into votes."""

    judge: Judge
    settings: JudgeSettings
    now_ms: Callable[[], int]
    heard: Callable[[str | None], None]

    async def cast(self, ballot: Ballot) -> Sequence[Event]:
        """Ask the judge. Raises TryLater where no reply arrived.

        A reward model gives no hints: its vote on that question is no, and it is not asked.
        """
        started_ms = self.now_ms()
        if isinstance(self.judge, RewardModel) and ballot.key.question is Question.HINT:
            return [replace(self._failed(ballot, None, 0), status=VoteStatus.READABLE, score=-1)]
        try:
            reply = await self._reply(ballot)
        except JudgeRefused as error:
            self.heard(str(error))
            return [self._failed(ballot, str(error), self.now_ms() - started_ms)]
        except TryLater as error:
            self.heard(str(error))
            raise
        self.heard(reply.unusable)
        reading = None if reply.unusable is not None else self._reading(ballot, reply)
        unread = f"{CUT} {self.settings.max_tokens}" if reply.cut and reading is None else reply.unusable
        return [
            replace(
                self._failed(ballot, unread, self.now_ms() - started_ms),
                status=VoteStatus.UNREADABLE if reading is None else VoteStatus.READABLE,
                score=None if reading is None else reading.score,
                hint=None if reading is None else reading.hint,
                text=reply.text,
                prompt_tokens=reply.prompt_tokens,
                completion_tokens=reply.completion_tokens,
            )
        ]

    async def _reply(self, ballot: Ballot) -> JudgeReply:
        if isinstance(self.judge, RewardModel):
            return await self.judge.rate(ballot.prompt.rated)
        return await self.judge.ask(ballot.prompt.system, ballot.prompt.user, seed=ballot.seed)

    def _reading(self, ballot: Ballot, reply: JudgeReply) -> VoteReading | None:
        if isinstance(self.judge, RewardModel):
            return rating(reply.text, self.judge.above)
        return read(ballot.key.question, reply.text, cut=reply.cut)

    def give_up(self, ballot: Ballot, why: str) -> Sequence[Event]:
        """Return the failed vote for a judge that did not reply before the deadline."""
        return [self._failed(ballot, why, int(self.settings.deadline_s * 1000))]

    def _failed(self, ballot: Ballot, why: str | None, latency_ms: int) -> VoteCast:
        return VoteCast(
            session_id=ballot.session_id,
            **ballot.key._asdict(),
            ballot=ballot.number,
            status=VoteStatus.FAILED,
            score=None,
            hint=None,
            text=None,
            error=why,
            prompt_tokens=None,
            completion_tokens=None,
            latency_ms=latency_ms,
            cast_at_ms=self.now_ms(),
        )


def heuristic_named(name: str) -> Heuristic:
    """Return the installed function of this name. Raises ConfigError where there is none that can be called."""

    def refused(found: str, advice: str) -> ConfigError:
        return ConfigError(f"rewards.heuristic_function is {name!r}: {found}. No turn is scored by it. {advice}")

    installed = entry_points(group=ENTRY_POINTS)
    points = [point for point in installed if point.name == name]
    if len(points) != 1:
        there = ", ".join(sorted(point.name for point in installed)) or "none"
        raise refused(
            f"{len(points)} installed packages have an entry point of that name in the group {ENTRY_POINTS}, "
            "expected 1",
            f"There are {there}; name one of them, or install the package beside clawstream",
        )
    try:
        score = points[0].load()
    except Exception as error:  # whatever somebody else's module raises
        raise refused(f"{points[0].value} can't be imported, {error!r}", "Mend the package, or name another") from error
    if not callable(score):
        raise refused(f"{points[0].value} is {score!r}, expected a function", "Name a function in the package")
    return Heuristic(name, score)


def heuristics_stage(
    heuristic: Heuristic, *, heard_ms: int, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
) -> Stage[Watched, DueTurn]:
    """Return the stage that has each finished turn scored by `heuristic`.

    Turns older than `heard_ms` are not scored, since feedback on them is ignored; so the first start on a long log does
    not score all of it. Where the function breaks on a turn, the record that completed the turn is set aside.
    """

    async def perform(due: DueTurn) -> Sequence[Event]:
        given = feedback(due, heuristic) if now_ms() - due.at_ms <= heard_ms else None
        return [] if given is None else [given]

    return Stage(
        name="heuristics",
        reads=HEURISTICS_READ,
        step=lambda session, record: heuristics.observe(session, record.event),
        perform=perform,
    )


def scored_again(heuristic: Heuristic) -> Stage[Watched, None]:
    """Return the stage as a replay hosts it: every turn is scored, however old."""

    def step(session: Watched | None, record: Record) -> Step[Watched, None]:
        known, _, due = heuristics.observe(session, record.event)
        return Step(known, [given for one in due if (given := feedback(one, heuristic)) is not None])

    return Stage(name="heuristics", reads=HEURISTICS_READ, step=step)
