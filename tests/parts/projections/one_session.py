"""One short session with everything that came of it, and the policy that learned from it."""

import json

from clawstream.events import (
    BatchPlanned,
    Event,
    ExchangeCompleted,
    FeedbackGiven,
    HintFound,
    PolicyActivated,
    PolicyPublished,
    Question,
    RequestDelta,
    SampleAssembled,
    SessionDone,
    StepTaken,
    TeacherScored,
    TeacherStatus,
    TurnPaired,
    TurnType,
    VerdictReached,
    VerdictStatus,
    VersionSpan,
    VoteCast,
    VoteStatus,
)
from tests.unit.projections.logs import START_MS, example

SESSION, FIRST, SECOND, SIDE = "session-1", "exchange-1", "exchange-2", "exchange-3"


def message(role: str, content: object) -> bytes:
    """A message as a client sends it."""
    return json.dumps({"role": role, "content": content}).encode()


SYSTEM = message("system", "You help.")
QUESTION = message("user", "What is 2 + 3?")
ANSWER = message("assistant", "**5**")
COMPLAINT = message("user", [{"type": "text", "text": "No bold, please."}])
BLOCK = message("user", "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>> 12:00 <<<END_OPENCLAW_INTERNAL_CONTEXT>>>")
SECOND_ANSWER = message("assistant", "5")


def _judged(kind: type, **said: object) -> Event:
    made: Event = example(
        kind, session_id=SESSION, turn_id=FIRST, judge="judge", prompt_version="v1", revision=0, **said
    )
    return made


def _vote(ballot: int, status: VoteStatus, score: int | None, question: Question = Question.SCORE) -> Event:
    return _judged(VoteCast, ballot=ballot, status=status, score=score, question=question, text=f"ballot {ballot}")


EXCHANGES: tuple[ExchangeCompleted, ...] = (
    example(
        ExchangeCompleted,
        session_id=SESSION,
        exchange_id=FIRST,
        turn_type=TurnType.MAIN,
        client="openclaw",
        request=RequestDelta(
            parent_exchange_id=None,
            kept_messages=0,
            kept_tokens=0,
            messages=(SYSTEM, QUESTION, BLOCK),
            token_ids=(1, 2, 3),
            options=b'{"tools": []}',
        ),
        policy_id="policy",
        versions=(VersionSpan(policy_version=0, num_tokens=2),),
        message=ANSWER,
        received_at_ms=START_MS,
    ),
    example(
        ExchangeCompleted,
        session_id=SESSION,
        exchange_id=SECOND,
        turn_type=TurnType.MAIN,
        client="headers",
        request=RequestDelta(
            parent_exchange_id=FIRST,
            kept_messages=2,
            kept_tokens=2,
            messages=(ANSWER, COMPLAINT, BLOCK),
            token_ids=(4, 5),
            options=None,
        ),
        policy_id="policy",
        versions=(VersionSpan(policy_version=0, num_tokens=1), VersionSpan(policy_version=1, num_tokens=1)),
        message=SECOND_ANSWER,
        received_at_ms=START_MS + 1000,
    ),
    example(
        ExchangeCompleted, session_id=SESSION, exchange_id=SIDE, turn_type=TurnType.SIDE, client="headers",
        policy_id="policy", request=example(RequestDelta, options=b"{}", kept_messages=0, kept_tokens=0),
    ),
)  # fmt: skip

SAMPLE: SampleAssembled = example(
    SampleAssembled,
    session_id=SESSION,
    turn_id=FIRST,
    judge="judge",
    prompt_version="v1",
    revision=0,
    reward=-1,
    total_reward=-1.0,
    hint="Answer without bold.",
    prompt_ids=(1, 2, 3),
    hinted_prompt_ids=(1, 2, 9, 3),
    response_ids=(7, 8),
    response_logprobs=(-0.5, None),
    trained=(1, 1),
    policy_id="policy",
    versions=(VersionSpan(policy_version=0, num_tokens=2),),
)

ONE_SESSION: tuple[Event, ...] = (
    *EXCHANGES,
    SessionDone(session_id=SESSION, after_exchange_id=SECOND),
    TurnPaired(session_id=SESSION, turn_id=FIRST, next_exchange_id=SECOND, next_state=(3,)),
    _vote(0, VoteStatus.READABLE, -1),
    _vote(1, VoteStatus.READABLE, 1),
    _vote(2, VoteStatus.READABLE, -1),
    _vote(3, VoteStatus.UNREADABLE, None),
    _vote(0, VoteStatus.READABLE, 1, Question.HINT),
    _judged(
        VerdictReached, status=VerdictStatus.DECIDED, score=-1,
        num_positive=1, num_neutral=0, num_negative=2, num_unreadable=1, num_failed=0,
    ),
    _judged(HintFound, hint="Answer without bold.", num_offered=1),
    _judged(
        TeacherScored, teacher="32b@there", scored_sha256="0" * 64, policy_id="policy", status=TeacherStatus.SCORED,
        teacher_logprobs=(-0.5,), student_logprobs=(-2.0,), student_version=0, error=None, latency_ms=9, scored_at_ms=9,
    ),
    example(FeedbackGiven, session_id=SESSION, turn_id=FIRST, score=-1.0),
    SAMPLE,
    example(PolicyPublished, policy_id="policy", policy_version=0, parent_version=None),
    example(
        BatchPlanned, policy_id="policy", policy_version=1, parent_version=0, sample_ids=(SAMPLE.sample_id, "elsewhere")
    ),
    example(StepTaken, policy_id="policy", policy_version=1, loss_nats=0.25, mean_reward=-1.0),
    example(PolicyPublished, policy_id="policy", policy_version=1, parent_version=0),
    example(PolicyActivated, policy_id="policy", policy_version=1, pause_ms=21.0),
)  # fmt: skip
