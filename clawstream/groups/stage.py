"""The two folds of the groups stage: samples -> trajectories that ended, and those -> advantages.

A record, or the clock of attempts' ends (`ended_at_ms`), ends a wait. That clock stands still while this
stage or one before it does, so no attempt is late because a stage was down.
"""

from collections.abc import Sequence
from typing import Any

from clawstream.events import RewardWeights, TrajectoryEnded
from clawstream.groups import trajectories
from clawstream.stream import topics
from clawstream.stream.stage import DAY_MS, Record, Stage

READS = (topics.EXCHANGES, topics.TURNS, topics.SAMPLES, topics.FEEDBACK)


def groups_stages(weights: RewardWeights, *, wait_s: float, retain_ms: int = DAY_MS) -> Sequence[Stage[Any, Any]]:
    """Return the fold by session and the fold by group, each with a consumer group of its own.

    A session is known until it was silent for `retain_ms`, and a group for a day longer, so that it is not begun again.
    """
    return (
        Stage(
            name="trajectories",
            reads=READS,
            step=lambda attempts, record: trajectories.observe(attempts, record.event, record.timestamp_ms),
            retain_ms=retain_ms,
        ),
        Stage(
            name="groups",
            reads=(topics.GROUPS,),
            step=lambda group, record: trajectories.settle(group, record.event, weights),
            tick=lambda group, now_ms: trajectories.wait(group, now_ms, wait_s),
            clock=_ended_at_ms,
            retain_ms=retain_ms + DAY_MS,
        ),
    )


def _ended_at_ms(record: Record) -> int | None:
    return record.event.ended_at_ms if isinstance(record.event, TrajectoryEnded) else None
