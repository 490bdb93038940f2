"""Tells whether learning stands still, and why, from the judge's votes, waiting samples and rewards. Pure.

Every alarm names a cause. An alarm about rewards needs `STILL_SAMPLES` samples, since fewer say nothing. An alarm about
a stage that does nothing at all needs only `FEW` turns, votes or verdicts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import linear_regression, mean
from typing import NamedTuple

from clawstream.events import CUT, StepRejected, StepTaken, VoteCast, VoteStatus
from clawstream.monitoring.windows import EventCounts
from clawstream.stream.stage import Record

IDLE_MS = 10 * 60_000  # a restarted trainer first loads a model, then takes the due batch
STILL_SAMPLES = 128
FEW = 4  # turns, votes or verdicts; one person's conversation gives as many in minutes
MOVES_SAMPLES = 512  # how many of the newest samples' rewards are looked at: in fewer a slow change does not show
MOVED_REWARD = 0.1  # a change of the mean reward (-1 to 1) by this much, over those samples, is no standstill
PLEASED_REWARD = 0.5  # a mean reward this high need not rise
STILL_MS = 30 * 60_000  # a step of a large policy may take this long


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReachability:
    """Whether the judge answered when it was last asked."""

    judge: str
    error: str | None  # why it does not answer; None: it does
    since_ms: int  # since when it has answered, or not answered (since the epoch, UTC)
    heard_ms: int  # when it was last asked


def by_votes(votes: Iterable[Record], judge: str) -> JudgeReachability | None:
    """Return whether `judge` answers, by its newest votes, given in any order; None: it has none among these.

    A question that is still being asked again has no vote yet.
    """
    found: JudgeReachability | None = None
    for record in sorted(votes, key=lambda record: record.timestamp_ms):
        if isinstance(record.event, VoteCast) and record.event.judge == judge:
            failed = record.event.status is VoteStatus.FAILED
            error = (record.event.error or "no reply") if failed else None
            found = after(found, judge, error, record.timestamp_ms)
    return found


def after(before: JudgeReachability | None, judge: str, error: str | None, at_ms: int) -> JudgeReachability:
    """Return whether the judge answers, now that it was asked at `at_ms`; `error`: why it did not (None: it did)."""
    since_ms = at_ms
    if before is not None and before.judge == judge and (before.error is None) is (error is None):
        since_ms = before.since_ms
    return JudgeReachability(judge=judge, error=error, since_ms=since_ms, heard_ms=at_ms)


def newest(*known: JudgeReachability | None, judge: str) -> JudgeReachability | None:
    """Return the latest of `known` about `judge`; None: there is none."""
    mine = [one for one in known if one is not None and one.judge == judge]
    return max(mine, key=lambda one: one.heard_ms, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadVotes:
    """How many of a judge's newest replies are no votes, and why."""

    replies: int
    cut: int  # ended at the limit of tokens
    cut_tokens: int | None  # the newest of these limits; None: none was cut
    without: int  # whole, and without a verdict that the question allows
    broken: int  # too long, or never ended


def readings(votes: Iterable[Record], judge: str) -> ReadVotes | None:
    """Return how the replies of `judge` were read, by its votes in any order; None: there are none among these."""
    ordered = [record.event for record in sorted(votes, key=lambda record: record.timestamp_ms)]
    mine = [vote for vote in ordered if isinstance(vote, VoteCast) and vote.judge == judge]
    replied = [vote for vote in mine if vote.status is not VoteStatus.FAILED]
    errors = [vote.error for vote in replied if vote.status is VoteStatus.UNREADABLE]
    limits = [error.removeprefix(CUT).strip() for error in errors if error is not None and error.startswith(CUT)]
    if not replied:
        return None
    return ReadVotes(
        replies=len(replied), cut=len(limits), cut_tokens=int(limits[-1]) if limits else None,
        without=errors.count(None), broken=len(errors) - errors.count(None) - len(limits),
    )  # fmt: skip


class BatchRule(NamedTuple):
    """When the trainer takes a batch."""

    batch_samples: int
    max_wait_ms: int


class TrainerSign(NamedTuple):
    """The newest event of the trainer on the log."""

    what: str
    at_ms: int
    in_step: bool  # whether a batch is planned whose outcome is not on the log yet


def overdue(came_ms: Sequence[int], due: BatchRule, seen: TrainerSign | None, now_ms: int) -> str | None:
    """Return words for people which say that the trainer seems to have stopped; None: it does not seem so.

    `came_ms` says since when each unplanned sample has been waiting.
    """
    last = (
        "was never heard of" if seen is None else f"was last heard of {_minutes(now_ms - seen.at_ms)} ago ({seen.what})"
    )
    if seen is not None and seen.in_step:
        if now_ms - seen.at_ms < STILL_MS:
            return None
        return f"the trainer {last}, and its step is not done yet: does `clawstream train` run? Its log says more"
    since = sorted(came_ms)
    if not since:
        return None
    due_ms = since[0] + due.max_wait_ms
    if len(since) >= due.batch_samples:
        due_ms = min(due_ms, since[due.batch_samples - 1])
    if now_ms - max(due_ms, 0 if seen is None else seen.at_ms) < IDLE_MS:
        return None
    return (
        f"{len(since)} samples wait, a batch was due {_minutes(now_ms - due_ms)} ago, and the trainer {last}: "
        "does `clawstream train` run? Its log says whether it ended (training.max_updates) or has no use for them "
        "(training.method, training.max_versions_behind)"
    )


def _minutes(ms: int) -> str:
    minutes = max(0, ms) // 60_000
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"


Outcome = StepTaken | StepRejected


class Planned(NamedTuple):
    """The newest batch that was planned."""

    policy_version: int
    num_samples: int
    at_ms: int


def recent(outcomes: Sequence[Outcome], num_samples: int = MOVES_SAMPLES) -> list[Outcome]:
    """Return as few of the newest outcomes as hold `num_samples` samples, but at least two; or all there are."""
    found: list[Outcome] = []
    for outcome in reversed(outcomes):
        if len(found) > 1 and sum(one.num_samples for one in found) >= num_samples:
            break
        found.insert(0, outcome)
    return found


def standstill(outcomes: Sequence[Outcome]) -> str | None:
    """Return why `STILL_SAMPLES` samples changed nothing, in words for people; None: they did, or too few came."""
    last = recent(outcomes, STILL_SAMPLES)
    if _samples(last) < STILL_SAMPLES:
        return None
    taken = _taken(last)
    went_by = f"{_samples(last)} samples went by"
    if not taken:
        reason = next(one.reason for one in reversed(last) if isinstance(one, StepRejected))
        return f"{went_by} and every step was rejected, the last one because {reason}"
    if all(one.learning_rate == 0 for one in taken):
        return f"{went_by} and no weight changed: the learning rate is 0"
    if all(one.grad_norm is None for one in taken):
        return f"{went_by} and no token of them could be trained on: see samples refused, and training.method"
    if all(one.weights_changed_share == 0 for one in taken):
        return f"{went_by} and no weight changed: the learning rate is too small for the numbers that are published"
    moves = recent(outcomes)
    return _reward_stands(_taken(moves), f"{_samples(moves)} samples went by")


def _samples(outcomes: Sequence[Outcome]) -> int:
    return sum(one.num_samples for one in outcomes)


def _taken(outcomes: Sequence[Outcome]) -> list[StepTaken]:
    return [one for one in outcomes if isinstance(one, StepTaken) and one.num_samples]  # a rollback has none


def unplanned(came_ms: Iterable[int], planned: Planned | None, now_ms: int) -> str | None:
    """Return words for people which say that samples wait, since `came_ms`, and no batch is planned.

    None: too few wait (less than `STILL_SAMPLES` or two batches), or not for `STILL_MS` yet.
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


def starved(hour: EventCounts, older: EventCounts, *, judged: bool = True) -> str | None:
    """Return why an hour's answers gave no sample, in words for people; None: they gave some, or were too few.

    `older` counts the part of the hour to which a judge should have replied by now. Where `judged` is False no judge is
    asked, so missing votes raise no alarm.
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


def _reward_stands(taken: Sequence[StepTaken], went_by: str) -> str | None:
    rewards = [one.mean_reward for one in taken if one.mean_reward is not None]
    if len(rewards) < 2:
        return None
    newer = mean(rewards[-(len(rewards) // 2) :])
    change, error = _change(rewards)
    if newer >= PLEASED_REWARD or abs(change) >= MOVED_REWARD or change + error >= 2 * MOVED_REWARD:
        return None
    hinted = sum(one.num_hinted for one in taken)
    why = "none of them has a hint" if not hinted else f"{hinted} of them have a hint"
    rate = f"the learning rate is {taken[-1].learning_rate:.2g}"
    return f"{went_by} and the mean reward stands at {newer:.2f}: {why}, {rate}"


def _change(rewards: Sequence[float]) -> tuple[float, float]:
    """Return by how much a straight line through `rewards` rises from the first to the last, and its standard error."""
    places = range(len(rewards))
    slope, begin = linear_regression(places, rewards)
    left = sum((reward - begin - slope * place) ** 2 for place, reward in zip(places, rewards, strict=True))
    spread = sum((place - mean(places)) ** 2 for place in places)
    error = sqrt(left / (len(rewards) - 2) / spread) if len(rewards) > 2 else 0.0
    return slope * places[-1], error * places[-1]
