"""What a record of version n says in the words of version n + 1, event by event. Pure.

The one rule: every step between two versions stands here, also where it only says that nothing was said; the log is
never rewritten. A meaning that can't be told from an older record is not a new version but another event.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from clawstream.events import (
    BatchPlanned,
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    FeedbackGiven,
    PolicyActivated,
    PolicyPublished,
    ReplayEnded,
    ReplayStarted,
    SampleAssembled,
    StepTaken,
)

Plain = Mapping[str, Any]  # a record's fields as Avro has them
Upcast = Callable[[Plain], Plain]
Upcasters = Mapping[tuple[type[Event], int], Upcast]  # by the event and the version that the record is of


def unsaid(*fields: str) -> Upcast:
    """Return the upcaster of records that did not say these fields: they are absent."""
    absent = dict.fromkeys(fields)
    return lambda plain: {**plain, **absent}


UPCASTERS: Upcasters = MappingProxyType(
    {
        (BatchPlanned, 1): unsaid("replay"),
        (BatchPlanned, 2): unsaid("rollback"),
        (ExchangeCompleted, 1): unsaid("key_name", "num_spliced"),
        (ExchangeFailed, 1): unsaid("key_name"),
        (FeedbackGiven, 1): unsaid("key_name"),
        (PolicyActivated, 1): unsaid("adapter"),
        (PolicyPublished, 1): unsaid("adapter"),
        (ReplayEnded, 1): unsaid("num_votes_cast"),
        (ReplayStarted, 1): unsaid("off_distribution"),
        (SampleAssembled, 1): unsaid("sampling"),
        (StepTaken, 1): unsaid("entropy_nats", "behaviour_kl_nats", "mean_response_tokens", "weights_changed_share"),
    }
)
