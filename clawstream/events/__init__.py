"""The events that the parts write to the log and read from it. This package depends on no other part.

One file per topic family. A field added here is also added to the event's next schema in schemas/, in the same order.
"""

from clawstream.events.base import (
    Event,
    LogProbs,
    Mask,
    Packed,
    PolicyEvent,
    SessionEvent,
    TokenIds,
    derived_id,
    float32,
)
from clawstream.events.control import (
    OffsetRange,
    ReplayEnded,
    ReplayStarted,
    RollbackAsked,
    SamplesPromoted,
    VersionPinned,
    VotesFrom,
)
from clawstream.events.exchanges import (
    ExchangeCompleted,
    ExchangeFailed,
    FailureReason,
    FinishReason,
    RequestDelta,
    Sampling,
    SessionDone,
    SessionIdle,
    Shaping,
    TokenBias,
    TurnType,
    VersionSpan,
)
from clawstream.events.groups import (
    GroupEvent,
    GroupSettled,
    GroupWaited,
    StepAdvantage,
    StepDropped,
    StepDropReason,
    TrajectoryEnded,
    TrajectoryLate,
    TrajectoryStep,
)
from clawstream.events.judging import (
    FeedbackGiven,
    FeedbackSource,
    HintAbsence,
    HintAbsent,
    HintFound,
    Question,
    TeacherScored,
    TeacherStatus,
    VerdictReached,
    VerdictStatus,
    VoteCast,
    VoteStatus,
    scoring_id_of,
    sha256_of,
)
from clawstream.events.policy import (
    BaseNamed,
    BatchPlanned,
    PlannedTurn,
    PolicyActivated,
    PolicyPublished,
    PolicyRejected,
    StepRejected,
    StepTaken,
    TopicOffset,
)
from clawstream.events.refreshing import FOR_A_LATE_SAMPLE, AnswerRefreshed, RefreshAsked
from clawstream.events.samples import (
    NOBODY,
    OffDistribution,
    RefusalReason,
    RewardWeights,
    SampleAssembled,
    SampleRefused,
)
from clawstream.events.turns import OrphanReason, TurnOrphaned, TurnPaired, TurnsSettled

EVENTS: tuple[type[Event], ...] = (
    ExchangeCompleted,
    ExchangeFailed,
    SessionDone,
    SessionIdle,
    TurnPaired,
    TurnOrphaned,
    TurnsSettled,
    VoteCast,
    VerdictReached,
    HintFound,
    HintAbsent,
    TeacherScored,
    FeedbackGiven,
    RefreshAsked,
    AnswerRefreshed,
    SampleAssembled,
    SampleRefused,
    TrajectoryEnded,
    GroupWaited,
    GroupSettled,
    TrajectoryLate,
    BaseNamed,
    BatchPlanned,
    StepTaken,
    StepRejected,
    PolicyPublished,
    PolicyActivated,
    PolicyRejected,
    ReplayStarted,
    ReplayEnded,
    SamplesPromoted,
    RollbackAsked,
    VersionPinned,
)
