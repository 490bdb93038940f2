"""The samples stage: answers, verdicts, hints and feedback -> samples; hinted prompts -> a teacher's scores.

A hinted prompt is made by the code that made the recorded prompt, so the two differ by the hint alone. Where an engine
is the teacher, this stage asks it, since only this stage has the hinted prompt. A scoring ends in exactly one event: a
missing score is asked for again until the deadline, and only then recorded as failed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from clawstream.events import Event, TeacherScored, TeacherStatus, float32
from clawstream.inference.engine import EngineRefused, ScoreRequest, Scores
from clawstream.inference.judge_client import TEACHER_CALL_TIMEOUT_S, TEACHER_CALLS_AT_ONCE, TEACHER_DEADLINE_S
from clawstream.samples.hinted import Scoring
from clawstream.samples.joining import SampleRules, observe
from clawstream.samples.session import JoiningState
from clawstream.stream import topics
from clawstream.stream.stage import DAY_MS, Stage

READS = (topics.EXCHANGES, topics.TURNS, topics.VERDICTS, topics.HINTS, topics.FEEDBACK, topics.ANSWERS)


class ScoringTeacher(Protocol):
    """The teacher, and the policy's engines beside it."""

    async def score(self, wanted: ScoreRequest) -> Scores:
        """Return the answer's log-probs by the teacher and by the policy; raises TryLater or EngineRefused."""


def samples_stage(rules: SampleRules, *, forgets: bool = True, retain_ms: int = DAY_MS) -> Stage[JoiningState, Scoring]:
    """Return the stage that joins what a trainer needs.

    With `forgets`, only what late feedback needs is kept of a done session once every judge with a verdict has finished
    it. Feedback counts until the session was silent for `retain_ms`. `asking_stage` makes the calls of this stage.
    """
    return Stage(
        name="samples",
        reads=READS,
        step=lambda session, record: observe(session, record.event, rules, forgets=forgets),
        retain_ms=retain_ms,
    )


def asking_stage(
    stage: Stage[JoiningState, Scoring],
    teacher: ScoringTeacher,
    *,
    call_timeout_s: float = TEACHER_CALL_TIMEOUT_S,
    deadline_s: float = TEACHER_DEADLINE_S,
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> Stage[JoiningState, Scoring]:
    """Return the samples stage `stage`, with its calls made to `teacher`."""
    caller = _TeacherCaller(teacher, now_ms, deadline_s)
    return replace(
        stage,
        perform=caller.ask,
        give_up=caller.give_up,
        calls_at_once=TEACHER_CALLS_AT_ONCE,
        call_timeout_s=call_timeout_s,
        deadline_s=deadline_s,
        waits_for_peer=False,  # samples without a hint don't wait for the teacher
    )


@dataclass(frozen=True, slots=True)
class _TeacherCaller:
    """Turns scorings into `TeacherScored` events."""

    teacher: ScoringTeacher
    now_ms: Callable[[], int]
    deadline_s: float

    async def ask(self, scoring: Scoring) -> Sequence[Event]:
        """Ask both engines. Raises TryLater where no score came."""
        began_ms = self.now_ms()
        try:
            scores = await self.teacher.score(scoring.wanted)
        except EngineRefused as error:
            return [self._event(scoring, TeacherStatus.REFUSED, error.message, self.now_ms() - began_ms)]
        scored = self._event(scoring, TeacherStatus.SCORED, None, self.now_ms() - began_ms)
        return [
            replace(
                scored,
                teacher_logprobs=float32(scores.teacher_logprobs),
                student_logprobs=float32(scores.student_logprobs),
                student_version=scores.student_version,
            )
        ]

    def give_up(self, scoring: Scoring, why: str) -> Sequence[Event]:
        """Return the event that says that no score came before the deadline."""
        return [self._event(scoring, TeacherStatus.FAILED, why, int(self.deadline_s * 1000))]

    def _event(self, scoring: Scoring, status: TeacherStatus, error: str | None, latency_ms: int) -> TeacherScored:
        return scoring.event(status, error, latency_ms=latency_ms, at_ms=self.now_ms())
