"""The samples stage: answers, verdicts, hints and feedback -> samples; and what a teacher makes of a hint.

The one rule: hinted prompts are made by the code that made the prompt, so the two differ by the hint alone. Where an
engine is the teacher it is asked here, as nobody else has that prompt, and a scoring ends in exactly one fact: what did
not arrive is asked again until the deadline, and only then recorded as failed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from clawstream.events import Event, TeacherStatus, float32
from clawstream.inference.engines.engine import EngineRefused, ScoreRequest, Scores
from clawstream.inference.teacher import CALL_TIMEOUT_S, CALLS_AT_ONCE, DEADLINE_S
from clawstream.samples.joining import SampleRules, observe
from clawstream.samples.session import JoiningState
from clawstream.samples.teaching import Scoring
from clawstream.stream.stage import DAY_MS, Record, Stage, Step

READS = (
    "clawstream.exchanges.v1",
    "clawstream.turns.v1",
    "clawstream.verdicts.v1",
    "clawstream.hints.v1",
    "clawstream.feedback.v1",
    "clawstream.answers.v1",
)


class ScoringTeacher(Protocol):
    """Who is asked."""

    async def score(self, wanted: ScoreRequest) -> Scores:
        """Return both scores; raises TryLater or EngineRefused."""


def samples_stage(rules: SampleRules, *, forgets: bool = True, retain_ms: int = DAY_MS) -> Stage[JoiningState, Scoring]:
    """Return the stage that joins what a trainer needs.

    It puts a session away that is done once every judge that has spoken is done with it, unless told not to; feedback
    on any is heard until the session was silent for `retain_ms`. Its calls are made by `asking_stage`.
    """

    def step(session: JoiningState | None, record: Record) -> Step[JoiningState, Scoring]:
        return Step(*observe(session, record.event, rules, forgets=forgets))

    return Stage(name="samples", reads=READS, step=step, retain_ms=retain_ms)


def asking_stage(
    stage: Stage[JoiningState, Scoring],
    teacher: ScoringTeacher,
    *,
    call_timeout_s: float = CALL_TIMEOUT_S,
    deadline_s: float = DEADLINE_S,
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> Stage[JoiningState, Scoring]:
    """Return the samples stage with its calls made, to `teacher`."""
    caller = _TeacherCaller(teacher, now_ms, deadline_s)
    return replace(
        stage,
        perform=caller.ask,
        give_up=caller.give_up,
        calls_at_once=CALLS_AT_ONCE,
        call_timeout_s=call_timeout_s,
        deadline_s=deadline_s,
        waits_for_peer=False,  # what has no hint waits for no teacher
    )


class _TeacherCaller:
    """Turns scorings into facts."""

    def __init__(self, teacher: ScoringTeacher, now_ms: Callable[[], int], deadline_s: float) -> None:
        self._teacher = teacher
        self._now_ms = now_ms
        self._deadline_ms = int(deadline_s * 1000)

    async def ask(self, scoring: Scoring) -> Sequence[Event]:
        """Ask both engines. Raises TryLater where no score came."""
        began_ms = self._now_ms()
        wanted = ScoreRequest(
            scoring.hinted_ids, scoring.prompt_ids, scoring.response_ids, scoring.policy_id, scoring.sampled_by
        )
        try:
            scores = await self._teacher.score(wanted)
        except EngineRefused as error:
            took_ms = self._now_ms() - began_ms
            return [
                scoring.said(
                    status=TeacherStatus.REFUSED, latency_ms=took_ms, at_ms=self._now_ms(), error=error.message
                )
            ]
        return [
            scoring.said(
                status=TeacherStatus.SCORED,
                latency_ms=self._now_ms() - began_ms,
                at_ms=self._now_ms(),
                teacher_logprobs=float32(scores.teacher_logprobs),
                student_logprobs=float32(scores.student_logprobs),
                student_version=scores.student_version,
            )
        ]

    def give_up(self, scoring: Scoring, why: str) -> Sequence[Event]:
        """Say that no score came before the deadline."""
        return [
            scoring.said(status=TeacherStatus.FAILED, latency_ms=self._deadline_ms, at_ms=self._now_ms(), error=why)
        ]
