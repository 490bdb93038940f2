"""Groups: several attempts at one task, by the same policy, which are judged by each other.

An attempt is a session's turns under one group id, a trajectory; its steps are compared with those of the other
attempts that have the same index.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from clawstream.events.base import Event, derived_id


class StepDropReason(StrEnum):
    """Why a step of an ended trajectory is not trained on."""

    NO_SAMPLE = "no_sample"  # it was refused, or nobody saw it delivered
    NO_REWARD = "no_reward"  # neither it nor its attempt was judged by anything that counts
    CONSTANT = "constant"  # all attempts have the same reward there, which says nothing
    LATE = "late"  # its group was settled without it


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvent(Event):
    """A fact about one group."""

    group_id: str

    @property
    def key(self) -> str:
        """The group."""
        return self.group_id


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryStep:
    """A turn of an attempt, and what was said of it alone."""

    turn_id: str
    step_index: int
    sample_id: str | None  # None: no sample came of it
    judge_reward: int | None  # -1 or 1; None, here and below: that source says nothing
    person_reward: float | None
    heuristic_reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEnded(GroupEvent):
    """An attempt is over, as is all judging of it; feedback that comes later makes another revision."""

    session_id: str
    trajectory_id: str  # its first turn
    revision: int  # how many facts it rests on: of two the one with more is newer
    ended_at_ms: int  # when the broker appended that the session is settled after its last turn
    group_size: int | None  # attempts at the task, as its client said; None: not said
    outcome: float | None  # the newest score that an environment gave one of its turns; None: it gave none
    steps: tuple[TrajectoryStep, ...]

    @property
    def event_id(self) -> str:
        """One per content: a sample's id says what was known of its step."""
        samples = [step.sample_id for step in self.steps]
        return derived_id("TrajectoryEnded", self.group_id, self.trajectory_id, self.revision, self.outcome, *samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWaited(GroupEvent):
    """`wait_s` passed since the first attempt ended, by the ends of attempts: the others are not waited for."""

    IDENTITY: ClassVar = ("group_id",)

    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAdvantage:
    """A step to train on."""

    turn_id: str
    sample_id: str
    step_index: int
    reward: float  # its own and its attempt's outcome, weighed
    advantage: float  # the reward against those of the other attempts at this index


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDropped:
    """A step that is not trained on."""

    turn_id: str
    sample_id: str | None  # None: no sample came of it
    step_index: int
    reason: StepDropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettled(GroupEvent):
    """The advantages of a group; every step of its trajectories stands here once."""

    IDENTITY: ClassVar = ("group_id",)

    trajectories: tuple[str, ...]  # ids of the TrajectoryEnded that it rests on
    complete: bool  # False: not all attempts had ended, with an outcome, when the wait was over
    advantages: tuple[StepAdvantage, ...]
    dropped: tuple[StepDropped, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryLate(GroupEvent):
    """A trajectory, or what became known of one, came after its group was settled, and changes nothing there."""

    IDENTITY: ClassVar = ("group_id", "trajectory")

    trajectory: str  # id of the TrajectoryEnded
    session_id: str
    dropped: tuple[StepDropped, ...]  # of its steps those that the settled group does not have so
