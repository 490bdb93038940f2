"""Events as the stages write them, with only what a test is about to be named."""

from clawstream.events import (
    BatchPlanned,
    PlannedTurn,
    PolicyActivated,
    PolicyPublished,
    Question,
    SampleAssembled,
    Sampling,
    StepRejected,
    TopicOffset,
    VerdictReached,
    VerdictStatus,
    VoteCast,
    VoteStatus,
)
from clawstream.stream.topics import SAMPLES


def vote(ballot: int, status: VoteStatus = VoteStatus.READABLE) -> VoteCast:
    readable = status is VoteStatus.READABLE
    return VoteCast(
        session_id="s",
        turn_id="t",
        question=Question.SCORE,
        judge="judge",
        prompt_version="1",
        revision=0,
        ballot=ballot,
        status=status,
        score=1 if readable else None,
        hint=None,
        text=None,
        error=None,
        prompt_tokens=None,
        completion_tokens=None,
        latency_ms=1,
        cast_at_ms=0,
    )


def verdict(turn_id: str, score: int | None, session_id: str = "s") -> VerdictReached:
    return VerdictReached(
        session_id=session_id,
        turn_id=turn_id,
        judge="judge",
        prompt_version="1",
        revision=0,
        status=VerdictStatus.BELOW_QUORUM if score is None else VerdictStatus.DECIDED,
        score=score,
        num_positive=0,
        num_neutral=0,
        num_negative=0,
        num_unreadable=0,
        num_failed=0,
    )


def sample(turn_id: str, policy_id: str = "policy", num_feedback: int | None = None) -> SampleAssembled:
    return SampleAssembled(
        session_id="s",
        turn_id=turn_id,
        judge="judge",
        prompt_version="1",
        revision=0,
        reward=1,
        hint=None,
        prompt_ids=(1, 2),
        hinted_prompt_ids=None,
        response_ids=(3, 4),
        response_logprobs=(-0.5, -0.25),
        trained=(1, 1),
        temperature=0.7,
        sampling=Sampling(temperature=0.7, top_p=1.0, top_k=None, max_tokens=2, seed=None, stop=()),
        policy_id=policy_id,
        versions=(),
        num_earlier_turns=0,
        total_reward=1.0,
        num_feedback=num_feedback,
    )


def plan(version: int, samples: tuple[SampleAssembled, ...], offsets: dict[int, int]) -> BatchPlanned:
    return BatchPlanned(
        policy_id="policy",
        policy_version=version,
        parent_version=version - 1,
        sample_ids=tuple(one.sample_id for one in samples),
        offsets=tuple(TopicOffset(topic=SAMPLES, partition=p, next_offset=at) for p, at in offsets.items()),
        seed=0,
        settings=b"{}",
        planned_at_ms=0,
        turns=tuple(
            PlannedTurn(turn_id=one.turn_id, judge=one.judge, prompt_version=one.prompt_version, revision=one.revision)
            for one in samples
        ),
    )


def published(version: int, path: str = "/weights") -> PolicyPublished:
    return PolicyPublished(
        policy_id="policy",
        policy_version=version,
        parent_version=version - 1 if version else None,
        path=path,
        adapter=None,
        manifest_sha256=None,
        num_bytes=1,
        published_at_ms=0,
    )


def rejected(version: int, reason: str = "it goes too far") -> StepRejected:
    return StepRejected(
        policy_id="policy", policy_version=version, num_samples=3, reason=reason, step_ms=5, rejected_at_ms=0
    )


def activated(version: int, engine: str = "http://engine", pause_ms: float = 5.0, at_ms: int = 0) -> PolicyActivated:
    return PolicyActivated(
        policy_id="policy",
        policy_version=version,
        engine=engine,
        adapter=None,
        pause_ms=pause_ms,
        num_bytes=1,
        activated_at_ms=at_ms,
    )
