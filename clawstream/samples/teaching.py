"""The question to a teacher about a hinted answer, and the event of its result. Pure.

The samples stage asks, since it alone knows the prompt with the hint in it. A call needs an answer, its verdict and its
hint, in any order of arrival; the record that completes them makes the call.
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
        """Return the event of the result."""
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
        """The `scoring_id` of its events."""
        key = self.key
        asked = (key.turn_id, key.judge, key.prompt_version, key.revision)
        return scoring_id_of(*asked, teacher=self.teacher, scored_sha256=self._scored_sha256)

    @property
    def _scored_sha256(self) -> str:
        return sha256_of(self.hinted_ids, self.prompt_ids, self.response_ids)
