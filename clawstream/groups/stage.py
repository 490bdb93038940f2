"""The two folds of the groups stage: samples -> attempts that ended (trajectories), trajectories -> advantages.

The wait for a group's attempts is measured by a clock that each attempt's `ended_at_ms` sets. That clock stands still
while this stage is down, so no attempt is late for that reason.
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

    A session is forgotten after `retain_ms` of silence, and a group a day later, so that no group begins twice.
    """
    return (
        trajectories_stage(retain_ms=retain_ms),
        Stage(
            name="groups",
            reads=(topics.GROUPS,),
            step=lambda group, record: trajectories.settle(group, record.event, weights),
            tick=lambda group, now_ms: trajectories.wait(group, now_ms, wait_s),
            clock=_ended_at_ms,
            retain_ms=retain_ms + DAY_MS,
        ),
    )


def trajectories_stage(*, retain_ms: int) -> Stage[trajectories.TrajectoryState, None]:
    """Return the fold by session, which says which attempts have ended."""
    return Stage(
        name="trajectories",
        reads=READS,
        step=lambda attempts, record: trajectories.observe(attempts, record.event, record.timestamp_ms),
        retain_ms=retain_ms,
    )


def _ended_at_ms(record: Record) -> int | None:
    return record.event.ended_at_ms if isinstance(record.event, TrajectoryEnded) else None
