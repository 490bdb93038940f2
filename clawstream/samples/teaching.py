"""What is to be asked of a teacher about a hinted answer, and what is said of it. Pure.

The samples stage asks, as it alone knows the prompt with the hint in it. A call rests on an answer, its verdict and its
hint, facts that arrive in any order, and is made by the record that completes them.
"""

from dataclasses import dataclass

from clawstream.events import TeacherScored, TeacherStatus, TokenIds, scoring_id_of, sha256_of
from clawstream.samples.session import VerdictKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """A question to a teacher, and to the policy's engine."""

    session_id: str
    key: VerdictKey  # whose hint it is
    teacher: str
    policy_id: str
    hinted_ids: TokenIds
    prompt_ids: TokenIds
    response_ids: TokenIds
    sampled_by: int  # the newest version that sampled a token of the response

    def said(
        self,
        *,
        status: TeacherStatus,
        latency_ms: int,
        at_ms: int,
        teacher_logprobs: tuple[float | None, ...] | None = None,
        student_logprobs: tuple[float | None, ...] | None = None,
        student_version: int | None = None,
        error: str | None = None,
    ) -> TeacherScored:
        """Return the event that tells what came of it."""
        return TeacherScored(
            session_id=self.session_id,
            turn_id=self.key.turn_id,
            judge=self.key.judge,
            prompt_version=self.key.prompt_version,
            revision=self.key.revision,
            teacher=self.teacher,
            scored_sha256=self._scored_sha256,
            policy_id=self.policy_id,
            status=status,
            teacher_logprobs=teacher_logprobs,
            student_logprobs=student_logprobs,
            student_version=student_version,
            error=error,
            latency_ms=latency_ms,
            scored_at_ms=at_ms,
        )

    @property
    def id(self) -> str:
        """What its events have as `scoring_id`."""
        key = self.key
        asked = (key.turn_id, key.judge, key.prompt_version, key.revision)
        return scoring_id_of(*asked, teacher=self.teacher, scored_sha256=self._scored_sha256)

    @property
    def _scored_sha256(self) -> str:
        return sha256_of(self.hinted_ids, self.prompt_ids, self.response_ids)
