"""Whether learning stands still, and why. Pure.

The one rule: an alarm names a cause. Of rewards none is raised before `STILL_SAMPLES` went by, as fewer say nothing; of
a part that does nothing at all, `FEW` are enough.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from clawstream.events import StepRejected, StepTaken
from clawstream.monitoring.tallies import Tally

STILL_SAMPLES = 128
FEW = 4  # turns, votes or verdicts, which one person gives in minutes
MOVED_REWARD = 0.1  # of a mean of -1 and 1, between the older and the newer half
PLEASED_REWARD = 0.5  # whoever is so far need not move
STILL_MS = 30 * 60_000  # a step of a large policy may take long
Outcome = StepTaken | StepRejected


class Planned(NamedTuple):
    """The newest batch that was planned."""

    policy_version: int
    num_samples: int
    at_ms: int


def recent(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the newest outcomes, as few as have `STILL_SAMPLES` samples and can be compared; all, where fewer are."""
    found: list[Outcome] = []
    for outcome in reversed(outcomes):
        if len(found) > 1 and sum(one.num_samples for one in found) >= STILL_SAMPLES:
            break
        found.insert(0, outcome)
    return found


def standstill(outcomes: Sequence[Outcome]) -> str | None:
    """Return why so many samples moved nothing, in words for a person; None: something moved, or they are too few."""
    last = recent(outcomes)
    num_samples = sum(one.num_samples for one in last)
    if num_samples < STILL_SAMPLES:
        return None
    taken = [one for one in last if isinstance(one, StepTaken) and one.num_samples]  # a rollback has none
    went_by = f"{num_samples} samples went by"
    if not taken:
        reason = next(one.reason for one in reversed(last) if isinstance(one, StepRejected))
        return f"{went_by} and every step was rejected, the last one because {reason}"
    if all(one.learning_rate == 0 for one in taken):
        return f"{went_by} and no weight changed: the learning rate is 0"
    if all(one.grad_norm is None for one in taken):
        return f"{went_by} and no token of them could be trained on: see samples refused, and training.method"
    if all(one.weights_changed_share == 0 for one in taken):
        return f"{went_by} and no weight changed: the learning rate is too small for the numbers that are published"
    return _score_stands(taken, went_by)


def unplanned(came_ms: Iterable[int], planned: Planned | None, now_ms: int) -> str | None:
    """Return why samples that wait since these times are in no batch, in words for a person.

    None: they are too few for two batches, or some of them came a moment ago.
    """
    since = sorted(came_ms if planned is None else (ms for ms in came_ms if ms > planned.at_ms))
    enough = STILL_SAMPLES if planned is None else max(STILL_SAMPLES, 2 * planned.num_samples)
    if len(since) < enough or now_ms - since[enough - 1] < STILL_MS:
        return None
    last = (
        "no batch was ever planned" if planned is None else f"none was planned after version {planned.policy_version}"
    )
    return (
        f"{len(since)} samples wait and {last}: does `clawstream train` run? Its log says whether it ended "
        "(training.max_updates), or has no use for them (training.method, training.max_versions_behind) or too few of "
        "them (training.batch_samples)"
    )


def starved(hour: Tally, older: Tally, *, judged: bool = True) -> str | None:
    """Return why an hour's answers gave no sample, in words for a person; None: they did, or they were too few.

    `older` is what of the hour is older than a judge takes; not `judged`, no judge is asked, and none is missed.
    """
    votes = sum(hour.votes.values())
    if hour.samples:
        return None
    if votes >= FEW and hour.votes.get("failed", 0) == votes:
        return f"all {votes} votes of the last hour failed: the judge is down or refuses us"
    if judged and older.turns_paired >= FEW and not votes:
        return (
            f"{hour.turns_paired} turns of the last hour have no vote: does the judge answer, and does `clawstream "
            "judging` run?"
        )
    if hour.verdicts >= FEW and not hour.verdicts_scored:
        return f"none of the {hour.verdicts} verdicts of the last hour has enough readable votes"
    refused = sum(hour.refusals.values())
    if refused >= FEW:
        why, most = max(hour.refusals.items(), key=lambda pair: pair[1])
        return f"no sample in the last hour and {refused} refused, {most} of them {why}"
    return None


def _score_stands(taken: Sequence[StepTaken], went_by: str) -> str | None:
    rewards = [one.mean_reward for one in taken if one.mean_reward is not None]
    half = len(rewards) // 2
    if not half:
        return None
    older, newer = sum(rewards[:half]) / half, sum(rewards[-half:]) / half
    if newer >= PLEASED_REWARD or abs(newer - older) >= MOVED_REWARD:
        return None
    hinted = sum(one.num_hinted for one in taken)
    why = "none of them has a hint" if not hinted else f"{hinted} of them have a hint"
    rate = f"the learning rate is {taken[-1].learning_rate:.2g}"
    return f"{went_by} and the mean reward stands at {newer:.2f}: {why}, {rate}"
