"""Whether a batch of samples is due and the trainer does not take it. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

IDLE_MS = 10 * 60_000  # a restarted trainer first loads a model, then takes the due batch
STEP_MS = 30 * 60_000  # a step of a large policy may take long


class BatchRule(NamedTuple):
    """When the trainer takes a batch."""

    batch_samples: int
    max_wait_ms: int


class TrainerSign(NamedTuple):
    """The newest that the log says of the trainer."""

    what: str
    at_ms: int
    in_step: bool  # a batch is planned and its outcome is not on the log yet


def overdue(came_ms: Sequence[int], due: BatchRule, seen: TrainerSign | None, now_ms: int) -> str | None:
    """Say, in words for a person, that the trainer seems to have stopped; None: it does not seem so.

    `came_ms` says since when each unplanned sample waits.
    """
    last = (
        "was never heard of" if seen is None else f"was last heard of {_minutes(now_ms - seen.at_ms)} ago ({seen.what})"
    )
    if seen is not None and seen.in_step:
        if now_ms - seen.at_ms < STEP_MS:
            return None
        return f"the trainer {last}, and that step is still to come: does `clawstream train` run? Its log says more"
    since = sorted(came_ms)
    full_ms = since[due.batch_samples - 1] if len(since) >= due.batch_samples else None
    due_ms = min(
        (ms for ms in (full_ms, since[0] + due.max_wait_ms if since else None) if ms is not None), default=None
    )
    if due_ms is None or now_ms - max(due_ms, 0 if seen is None else seen.at_ms) < IDLE_MS:
        return None
    return (
        f"{len(since)} samples wait, a batch of them is due for {_minutes(now_ms - due_ms)}, and the trainer {last}: "
        "does `clawstream train` run? Its log says whether it ended (training.max_updates) or has no use for them "
        "(training.method, training.max_versions_behind)"
    )


def _minutes(ms: int) -> str:
    minutes = max(0, ms) // 60_000
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"
