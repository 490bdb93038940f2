"""Feedback on an answer, and the reward that verdict and feedback add up to. Pure.

Each source's newest score by topic order counts, and a missing score is absent, never 0. The number of changes of score
identifies what a sample knows, so the same feedback makes the same sample whatever was read between.
"""

from collections.abc import Mapping
from math import isfinite
from types import MappingProxyType
from typing import NamedTuple

from clawstream.errors import UnusableEvent
from clawstream.events import FeedbackGiven, FeedbackSource, RewardWeights

REMEMBERED_IDS = 256  # of a turn; a repeated record comes soon


class Opinions(NamedTuple):
    """What was said of one answer."""

    num_changes: int = 0  # how often a source's score changed; `num_feedback` of samples
    scores: Mapping[FeedbackSource, float] = MappingProxyType({})
    ids: tuple[str, ...] = ()  # of the feedback, the newest last


class Parts(NamedTuple):
    """A reward's parts; None: that source gave no score."""

    judge: int | None
    person: float | None
    environment: float | None
    heuristic: float | None


def heard(opinions: Opinions, given: FeedbackGiven) -> Opinions:
    """Return the opinions with `given` among them; the same object where it was read before.

    Words alone, or a score equal to the source's newest, change no score. Raises UnusableEvent for an invalid score.
    """
    if given.score is not None and not (isfinite(given.score) and abs(given.score) <= 1):
        raise UnusableEvent(
            f"feedback {given.feedback_id}: its score is {given.score}, expected -1 to 1; it is set aside"
        )
    if given.feedback_id in opinions.ids:
        return opinions
    ids = (*opinions.ids, given.feedback_id)[-REMEMBERED_IDS:]
    if given.score is None or given.score == opinions.scores.get(given.source):
        return opinions._replace(ids=ids)
    return Opinions(opinions.num_changes + 1, MappingProxyType({**opinions.scores, given.source: given.score}), ids)


def parts_of(judged: int | None, opinions: Opinions) -> Parts:
    """Return the parts, `judged` being the verdict's score."""
    person, environment, heuristic = (
        opinions.scores.get(source)
        for source in (FeedbackSource.PERSON, FeedbackSource.ENVIRONMENT, FeedbackSource.HEURISTIC)
    )
    return Parts(judged, person, environment, heuristic)


def reward_of(parts: Parts, weights: RewardWeights) -> float | None:
    """Return the weighted sum of the parts that are there, from -1 to 1.

    None: no part that counts is there or other than 0. Parts that cancel each other give 0, not None.
    """
    weighed = (weights.judge, weights.person, weights.environment, weights.heuristic)
    said = [weight * part for weight, part in zip(weighed, parts, strict=True) if part is not None]
    return max(-1.0, min(1.0, sum(said))) if any(said) else None
