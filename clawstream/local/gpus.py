"""Which GPU of a machine does what: the actor trains, the rollout engines serve, the judges judge. Pure.

The counts and their order are those that users of OpenClaw-RL know: the first GPUs are the actor's, then the rollout's,
then the judges' (its PRM). `deploy/gpus.sh` is the same rule for `deploy/compose.yaml`.
"""

from dataclasses import dataclass

from clawstream.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCounts:
    """How many GPUs there are, and how many each role gets."""

    machine: int
    actor: int
    rollout: int
    judge: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """GPUs by number: the actor's, each engine's, and the judge server's."""

    actor: tuple[int, ...]
    rollout: tuple[tuple[int, ...], ...]
    judge: tuple[int, ...]


def share_out(machine: int, actor: int | None, rollout: int | None, judge: int | None) -> GpuCounts:
    """Return the counts, with halves and quarters for the unset ones: 8 GPUs become 4, 2 and 2.

    The judge gets no more than the others leave, which may be nothing. Raises ConfigError where they don't fit.
    """
    quarter = max(1, machine // 4)
    trains = max(1, machine // 2) if actor is None else actor
    serves = quarter if rollout is None else rollout
    left = max(0, machine - trains - serves)
    counts = GpuCounts(
        machine=machine, actor=trains, rollout=serves, judge=min(quarter, left) if judge is None else judge
    )
    wanted = counts.actor + counts.rollout + counts.judge
    if wanted > machine:
        raise ConfigError(
            f"ACTOR_GPUS + ROLLOUT_GPUS + PRM_GPUS is {counts.actor} + {counts.rollout} + {counts.judge} = {wanted}; "
            f"NUM_GPUS is {machine}. {_way_out(machine)}. Nothing was started"
        )
    return counts


def _way_out(machine: int) -> str:
    if machine == 1:
        return (
            "Training and serving take a GPU each: with one, give it to SGLang, start that yourself, and run "
            "`clawstream up` with engine.urls and an empty CUDA_VISIBLE_DEVICES"
        )
    return "Lower one (PRM_GPUS=0: judges elsewhere, by judge.url)"


def assign(counts: GpuCounts, *, rollout_tp: int, judge_tp: int) -> Assignment:
    """Return which GPUs each role has: engines of `rollout_tp` each, one judge server of replicas of `judge_tp` each.

    Raises ConfigError where such a size does not divide the role's number of GPUs.
    """
    _check(counts.rollout, rollout_tp, "ROLLOUT_GPUS", "TP")
    _check(counts.judge, judge_tp, "PRM_GPUS", "PRM_TP")
    numbers = iter(range(counts.machine))

    def take(count: int) -> tuple[int, ...]:
        return tuple(next(numbers) for _ in range(count))

    actor = take(counts.actor)
    return Assignment(
        actor=actor,
        rollout=tuple(take(rollout_tp) for _ in range(counts.rollout // rollout_tp)),
        judge=take(counts.judge),
    )


def _check(count: int, tp: int, role: str, dial: str) -> None:
    if count % tp:
        raise ConfigError(
            f"{role} is {count} and {dial} is {tp}: a model takes {tp} GPUs, so {count} can't be shared out. "
            f"Choose a {dial} that divides it. Nothing was started"
        )
