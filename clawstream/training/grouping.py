"""Which groups of samples can be trained on as a whole. Pure: time comes in as an argument.

The one rule: what a group's settlement names is planned together, or never: a sample that is not there when the wait
for it is over is left out for good.
"""

from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

from clawstream.events import GroupSettled, SampleAssembled, StepAdvantage, TrajectoryLate


class _Settled(NamedTuple):
    at_ms: int  # when the broker appended it
    steps: tuple[StepAdvantage, ...]


class Groups:
    """The settlements that were read, and which samples they decide about."""

    def __init__(self) -> None:
        self._settled: dict[str, _Settled] = {}  # by group id, in topic order; planned ones are let go
        self._known: set[str] = set()  # groups
        self._decided: dict[str, set[str]] = {}  # by turn: the samples that it is trained by, if any

    def learn(self, event: GroupSettled | TrajectoryLate, at_ms: int) -> frozenset[str]:
        """Take it in, the first of a group; return the turns that it decides about."""
        turns = {step.turn_id for step in event.dropped}
        if isinstance(event, GroupSettled):
            if event.group_id in self._known:
                return frozenset()
            self._known.add(event.group_id)
            self._settled[event.group_id] = _Settled(at_ms, event.advantages)
            for step in event.advantages:
                self._decided.setdefault(step.turn_id, set()).add(step.sample_id)
                turns.add(step.turn_id)
        for turn_id in turns:
            self._decided.setdefault(turn_id, set())
        return frozenset(turns)

    def leaves_out(self, sample: SampleAssembled) -> bool:
        """Return whether the sample's turn is decided about, and it is not trained by this sample."""
        decided = self._decided.get(sample.turn_id)
        return decided is not None and sample.sample_id not in decided

    def is_over(self, turns: Container[str]) -> list[str]:
        """Let go of groups of which a turn is among those that are planned; return the samples they name.

        What of them comes after that is left out.
        """
        over = [name for name, one in self._settled.items() if any(step.turn_id in turns for step in one.steps)]
        steps = [step for name in over for step in self._settled.pop(name).steps]
        for step in steps:
            self._decided[step.turn_id] = set()
        return [step.sample_id for step in steps]

    def oldest_ms(self, waits: Container[str]) -> int | None:
        """Return when the first group was settled of which a sample waits; None: there is none."""
        at_ms = [one.at_ms for one in self._settled.values() if any(step.sample_id in waits for step in one.steps)]
        return min(at_ms, default=None)

    def choose(
        self, waits: Container[str], gone: Callable[[str], bool], *, at_most: int, settled_before_ms: int
    ) -> Mapping[str, float] | None:
        """Return the next batch: advantages by sample id, of as many groups as fit, and one in any case.

        `waits` are the samples that can be had, and `gone` says of another whether it never can. None: it is not
        time yet, as there are fewer than `at_most` and no group was settled before `settled_before_ms`.
        """
        advantages: dict[str, float] = {}
        num_ready, is_old = 0, False
        for one in self._settled.values():
            here = {step.sample_id: step.advantage for step in one.steps if step.sample_id in waits}
            old = one.at_ms <= settled_before_ms
            if not here or not (old or all(s.sample_id in here or gone(s.sample_id) for s in one.steps)):
                continue
            num_ready += len(here)
            is_old = is_old or old
            if not advantages or num_ready <= at_most:
                advantages |= here
        return advantages if advantages and (is_old or num_ready >= at_most) else None
