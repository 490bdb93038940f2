"""What a trainer remembers from version to version beside tensors. Pure.

It remembers the learning rate's schedule, the rewards of answers that call tools, how often judges and people agreed,
and the gate's memory.

The learning rate falls with the updates, never under a quarter of its peak, and starts again at its peak when people
want something else. Either of two signs says so: the mean of the last rewards fell far below its best, or the mean of
the last gaps rose far above its least. The second sign needs no rewards. An answer's gap is here how much likelier the
policy finds it than its teacher, which saw the hint: in nats, the mean over its trained tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from statistics import fmean
from typing import Any

from clawstream.events import SampleAssembled
from clawstream.training.publishing import GateMemory

CONSTANT_UPDATES = 8  # updates at the peak; after these the rate falls with the inverse square root
LEAST_SHARE = 0.25  # of the peak; it is reached after 128 updates
WINDOW = 128  # rewards, or gaps
RESTART_DROP = 0.5  # of the mean reward: over five of its standard deviations, if rewards of -1 and 1 were coin tosses
TRUSTED_VERDICTS = 8  # a judge begins as if so many of its verdicts had been checked and right
LEAST_REWARDS = 8  # the mean of fewer is not used
RESTART_FACTOR = 2.0  # of the mean gap over its least
RESTART_DEVIATIONS = 7.0  # of a window's mean gap; a smaller rise above the least of many windows may be chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The updates, rewards and gaps since the learning rate last started at its peak."""

    num_updates: int = 0  # without rejected steps; a rollback restores it
    last_rewards: tuple[float, ...] = ()  # at most a window of them, the newest last
    best_mean: float | None = None  # of a window of rewards; None: no window was full yet
    last_gaps: tuple[float, ...] = ()  # at most a window of them, the newest last
    least_gap: float | None = None  # the mean of a window of gaps; None: no window was full yet

    def after(self, rewards: Sequence[float]) -> "Schedule":
        """Return the schedule for one more step, whose samples have these rewards."""
        last = (*self.last_rewards, *rewards)[-WINDOW:]
        best = self.best_mean
        if len(last) == WINDOW:
            mean = fmean(last)
            best = mean if best is None else max(best, mean)
            if mean <= best - RESTART_DROP:
                return Schedule(num_updates=1)
        return replace(self, num_updates=self.num_updates + 1, last_rewards=last, best_mean=best)

    def having_seen(self, gaps: Sequence[float]) -> "Schedule":
        """Return the schedule with the gaps of the step's hinted answers; only the next step's rate goes by them."""
        last = (*self.last_gaps, *gaps)[-WINDOW:]
        least = self.least_gap
        if len(last) == WINDOW:
            mean = fmean(last)
            least = mean if least is None else min(least, mean)
            deviation = sqrt(fmean((gap - mean) ** 2 for gap in last) / WINDOW)
            if mean >= RESTART_FACTOR * least and mean - least > RESTART_DEVIATIONS * deviation:
                return Schedule()
        return replace(self, last_gaps=last, least_gap=least)

    def learning_rate(self, *, peak: float) -> float:
        """Return the rate of the newest step: `peak` at first, then falling with the inverse square root to the floor.

        The pieces meet: update `CONSTANT_UPDATES` has the peak by either rule.
        """
        return peak * max(LEAST_SHARE, min(1.0, sqrt(CONSTANT_UPDATES / max(1, self.num_updates))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalls:
    """The rewards of answers that call tools. Nearly all are good, so only how far one is from their mean teaches.

    People judge other answers, and what they usually praise is what they want: these rewards stay as they are.
    """

    last_rewards: tuple[float, ...] = ()  # at most a window of them, the newest last

    @property
    def baseline(self) -> float:
        """What is subtracted from such an answer's reward: the mean, or 0 where too few are known."""
        return fmean(self.last_rewards) if len(self.last_rewards) >= LEAST_REWARDS else 0.0

    def after(self, samples: Sequence[SampleAssembled]) -> "ToolCalls":
        """Return the rewards with those of a step's samples."""
        new = [s.learned_reward for s in samples if s.calls_tools and s.learned_reward is not None]
        return ToolCalls(last_rewards=(*self.last_rewards, *new)[-WINDOW:])


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAccuracy:
    """How often each judge's verdict had the sign of a person's score of the same answer."""

    last_agreed: Mapping[str, tuple[bool, ...]] = field(
        default_factory=dict
    )  # by judge and prompt version, newest last

    def weight(self, sample: SampleAssembled) -> float:
        """Return how much the verdict of this sample's judge counts, from 0 to 1: 2 * accuracy - 1.

        That is the expected sign of a person's score where the verdict is 1. The accuracy begins as if
        `TRUSTED_VERDICTS` had been right, so that a judge whom nobody checked has the weight 1.
        """
        agreed = self.last_agreed.get(_judge(sample), ())
        accuracy = (sum(agreed) + TRUSTED_VERDICTS) / (len(agreed) + TRUSTED_VERDICTS)
        return max(0.0, 2 * accuracy - 1)

    def after(self, samples: Sequence[SampleAssembled]) -> "JudgeAccuracy":
        """Return the accuracy after a step, with its answers that both a judge and a person scored."""
        last_agreed = dict(self.last_agreed)
        for sample in samples:
            if sample.reward and sample.person_reward and not sample.cut:
                agreed = (*last_agreed.get(_judge(sample), ()), sample.reward * sample.person_reward > 0)
                last_agreed[_judge(sample)] = agreed[-WINDOW:]
        return JudgeAccuracy(last_agreed=last_agreed)


def _judge(sample: SampleAssembled) -> str:
    return f"{sample.judge} {sample.prompt_version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """All that a trainer remembers beside tensors; a checkpoint keeps it, so that a rollback restores it."""

    schedule: Schedule = Schedule()
    tool_calls: ToolCalls = ToolCalls()
    judges: JudgeAccuracy = JudgeAccuracy()
    gate: GateMemory = field(default_factory=GateMemory)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Carried":
        """Return what a checkpoint's plain values describe."""
        saved = plain["schedule"]
        windows = {name: tuple(saved[name]) for name in ("last_rewards", "last_gaps")}
        return cls(
            schedule=Schedule(**saved | windows),
            tool_calls=ToolCalls(last_rewards=tuple(plain["tool_calls"]["last_rewards"])),
            judges=JudgeAccuracy(last_agreed={name: tuple(agreed) for name, agreed in plain["judges"].items()}),
            gate=GateMemory.of(plain["gate"]),
        )

    def plain(self) -> dict[str, Any]:
        """Return the plain values that `of` takes."""
        return {
            "schedule": asdict(self.schedule),
            "tool_calls": asdict(self.tool_calls),
            "judges": dict(self.judges.last_agreed),
            "gate": self.gate.plain(),
        }
