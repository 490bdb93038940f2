"""What a record of version n says in the words of version n + 1, event by event. Pure.

The one rule: every step between two versions stands here, also where it only says that nothing was said; the log is
never rewritten. A meaning that can't be told from an older record is not a new version but another event.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from clawstream.events import (
    AnswerRefreshed,
    BatchPlanned,
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    FeedbackGiven,
    HintAbsent,
    PolicyActivated,
    PolicyPublished,
    RefreshAsked,
    ReplayEnded,
    ReplayStarted,
    SampleAssembled,
    SampleRefused,
    StepTaken,
    TurnPaired,
)

Plain = Mapping[str, Any]  # a record's fields as Avro has them
Upcast = Callable[[Plain], Plain]
Upcasters = Mapping[tuple[type[Event], int], Upcast]  # by the event and the version that the record is of


def unsaid(*fields: str) -> Upcast:
    """Return the upcaster of records that did not say these fields: they are absent."""
    absent = dict.fromkeys(fields)
    return lambda plain: {**plain, **absent}


def _unshaped(plain: Plain) -> Plain:
    """What shapes a distribution was refused then; where nobody said how was sampled, nobody says it now."""
    sampling = plain["sampling"]
    return {**plain, "sampling": None if sampling is None else {**sampling, "shaping": None}}


def _rewarded_by_the_judge(plain: Plain) -> Plain:
    """There was no feedback in rewards: the whole of one was the judge's part. And only the trainer was a teacher."""
    total = None if plain["reward"] is None else float(plain["reward"])
    return {**_NO_TEACHER(_NO_FEEDBACK(plain)), "total_reward": total}


_NO_FEEDBACK = unsaid(
    "person_reward",
    "environment_reward",
    "heuristic_reward",
    "num_feedback",
    "group_id",
    "step_index",
    "refreshed_id",
)
_NO_TEACHER = unsaid("teacher", "teacher_logprobs", "student_logprobs", "student_version")


UPCASTERS: Upcasters = MappingProxyType(
    {
        (AnswerRefreshed, 1): _unshaped,
        (BatchPlanned, 1): unsaid("replay"),
        (BatchPlanned, 2): unsaid("rollback", "turns", "advantages"),
        (ExchangeCompleted, 1): unsaid("key_name", "num_spliced"),
        (ExchangeCompleted, 2): unsaid("group_id", "group_size", "step_index"),
        (ExchangeCompleted, 3): _unshaped,
        (ExchangeCompleted, 4): unsaid("choice_of"),
        (ExchangeFailed, 1): unsaid("key_name"),
        (ExchangeFailed, 2): unsaid("message", "num_sent_tokens", "output_logprobs", "versions", "sampling"),
        (FeedbackGiven, 1): unsaid("key_name"),
        (HintAbsent, 1): unsaid("num_offered"),
        (PolicyActivated, 1): unsaid("adapter"),
        (PolicyPublished, 1): unsaid("adapter"),
        (RefreshAsked, 1): _unshaped,
        (ReplayEnded, 1): unsaid("num_votes_cast"),
        (ReplayStarted, 1): unsaid("off_distribution"),
        (ReplayStarted, 2): unsaid("reward_weights", "hint_quorum", "teacher", "heuristic_function"),
        (SampleAssembled, 1): unsaid("sampling"),
        (SampleAssembled, 2): _rewarded_by_the_judge,
        (SampleAssembled, 3): _unshaped,
        (SampleRefused, 1): unsaid("refreshed_id"),
        (TurnPaired, 1): unsaid("interrupted"),
        (StepTaken, 1): unsaid("entropy_nats", "behaviour_kl_nats", "mean_response_tokens", "weights_changed_share"),
    }
)
