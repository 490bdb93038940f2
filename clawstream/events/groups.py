"""Groups: several attempts at one task by the same policy, each rewarded relative to the others.

An attempt, or trajectory, is a session's turns under one group id. Each step is compared with the steps of the same
index in the other attempts.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from clawstream.events.base import Event, derived_id


class StepDropReason(StrEnum):
    """Why a step of an ended trajectory is not trained on."""

    NO_SAMPLE = "no_sample"  # its sample was refused, or its answer was never seen delivered
    NO_REWARD = "no_reward"  # no source that counts scored the step or its attempt
    CONSTANT = "constant"  # all attempts have the same reward at this index
    LATE = "late"  # the group was settled without this step


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvent(Event):
    """A fact about one group."""

    IDENTITY: ClassVar[tuple[str, ...]] = ("group_id",)

    group_id: str

    @property
    def key(self) -> str:
        """The group."""
        return self.group_id


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryStep:
    """A turn of an attempt, with the scores of that turn alone."""

    turn_id: str
    step_index: int
    sample_id: str | None  # None: no sample came of it
    judge_reward: int | None  # -1 or 1; None, here and in the next two: this source gave no score
    person_reward: float | None
    heuristic_reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEnded(GroupEvent):
    """An attempt and all judging of it are over. Later feedback leads to another event, with a higher revision."""

    session_id: str
    trajectory_id: str  # the id of its first turn
    revision: int  # the number of facts that it rests on; the highest revision is the newest
    ended_at_ms: int  # when the broker appended the event that settled the session after the attempt's last turn
    group_size: int | None  # how many attempts the group has, as the client said; None: not said
    outcome: float | None  # the newest score that an environment gave one of its turns; None: no such score
    steps: tuple[TrajectoryStep, ...]

    @property
    def event_id(self) -> str:
        """One per content, in which each step counts by its sample's id."""
        samples = [step.sample_id for step in self.steps]
        return derived_id("TrajectoryEnded", self.group_id, self.trajectory_id, self.revision, self.outcome, *samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWaited(GroupEvent):
    """`wait_s` passed since the first attempt ended, by `ended_at_ms`; open attempts are not waited for any more."""

    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAdvantage:
    """A step to train on."""

    turn_id: str
    sample_id: str
    step_index: int
    reward: float  # the weighted sum of the step's scores and its attempt's outcome
    advantage: float  # the reward relative to those of the other attempts at this index


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDropped:
    """A step that is not trained on."""

    turn_id: str
    sample_id: str | None  # None: no sample came of it
    step_index: int
    reason: StepDropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettled(GroupEvent):
    """The advantages of a group; every step of its trajectories is listed once."""

    trajectories: tuple[str, ...]  # ids of the TrajectoryEnded events that the advantages rest on
    complete: bool  # False: the wait ended before all attempts had ended with an outcome
    advantages: tuple[StepAdvantage, ...]
    dropped: tuple[StepDropped, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryLate(GroupEvent):
    """A trajectory, or a newer revision of one, came after its group was settled; the group stays as it is."""

    IDENTITY: ClassVar = ("group_id", "trajectory")

    trajectory: str  # the id of its TrajectoryEnded event
    session_id: str
    dropped: tuple[StepDropped, ...]  # the steps that the settled group lacks, or has with another sample
