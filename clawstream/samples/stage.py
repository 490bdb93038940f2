"""The samples stage: answers, verdicts, hints and feedback -> samples; and a teacher's scores of hinted answers.

Hinted prompts are made by the code that made the prompt, so the two differ by the hint alone. Where an engine is the
teacher, this stage asks it, since only this stage has the hinted prompt. A scoring ends in exactly one fact: a missing
score is asked for again until the deadline, and only then recorded as failed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from clawstream.events import Event, TeacherStatus, float32
from clawstream.inference.engines.engine import EngineRefused, ScoreRequest, Scores
from clawstream.inference.teacher import CALL_TIMEOUT_S, CALLS_AT_ONCE, DEADLINE_S
from clawstream.samples.hinted import Scoring
from clawstream.samples.joining import SampleRules, observe
from clawstream.samples.session import JoiningState
from clawstream.stream import topics
from clawstream.stream.stage import DAY_MS, Record, Stage, Step

READS = (topics.EXCHANGES, topics.TURNS, topics.VERDICTS, topics.HINTS, topics.FEEDBACK, topics.ANSWERS)


class ScoringTeacher(Protocol):
    """The teacher, and the policy's engines beside it."""

    async def score(self, wanted: ScoreRequest) -> Scores:
        """Return both scores; raises TryLater or EngineRefused."""


def samples_stage(rules: SampleRules, *, forgets: bool = True, retain_ms: int = DAY_MS) -> Stage[JoiningState, Scoring]:
    """Return the stage that joins what a trainer needs.

    With `forgets`, it puts a done session away once every judge with a verdict has finished it. Feedback counts until
    the session was silent for `retain_ms`. `asking_stage` makes the calls of this stage.
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
        waits_for_peer=False,  # samples without a hint don't wait for the teacher
    )


class _TeacherCaller:
    """Turns scorings into `TeacherScored` events."""

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
