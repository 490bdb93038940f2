"""Which groups of samples can be trained on as a whole. Pure: time comes in as an argument.

The one rule: the samples that a group's settlement names are planned together, or never. A group is ready once all of
them are here, or once everything is read that stood on the log when the group was settled: a sample missing by then
never comes.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from clawstream.events import GroupSettled, SampleAssembled, StepAdvantage


@dataclass(slots=True)
class _Settled:
    at_ms: int  # when the broker appended it
    steps: tuple[StepAdvantage, ...]
    read_past: bool = False

    def here(self, waits: Container[str]) -> dict[str, float] | None:
        """Return the advantages of the group's waiting samples; None: more of them may come."""
        found = {step.sample_id: step.advantage for step in self.steps if step.sample_id in waits}
        return found if self.read_past or len(found) == len(self.steps) else None


class SettledGroups:
    """The settlements that were read, and which samples they name."""

    def __init__(self) -> None:
        self._settled: dict[str, _Settled] = {}  # by group id, in topic order; groups that are over are removed
        self._named: dict[str, frozenset[str]] = {}  # by settled group: its samples; empty once it is over
        self._group_of: dict[str, str] = {}  # by turn, for the groups in `_settled`

    def learn(self, event: GroupSettled, at_ms: int) -> None:
        """Take in a settlement; the first one of a group counts."""
        if event.group_id in self._named:
            return
        self._named[event.group_id] = frozenset(step.sample_id for step in event.advantages)
        self._settled[event.group_id] = _Settled(at_ms, event.advantages)
        self._group_of |= {step.turn_id: event.group_id for step in event.advantages}

    def read_past(self, group_ids: Iterable[str]) -> None:
        """Note that everything is read that stood on the log when these groups were settled."""
        for group_id in group_ids:
            if group_id in self._settled:
                self._settled[group_id].read_past = True

    def is_settled(self, sample: SampleAssembled) -> bool:
        """Return whether the sample's group is settled, whether or not it names the sample."""
        return sample.group_id in self._named

    def leaves_out(self, sample: SampleAssembled) -> bool:
        """Return whether the sample's group is settled without it, which is final."""
        named = None if sample.group_id is None else self._named.get(sample.group_id)
        return named is not None and sample.sample_id not in named

    def end(self, turns: Iterable[str]) -> list[str]:
        """Remove the groups of these planned turns; return the samples that the groups name.

        Samples of these groups that come later are left out.
        """
        over = dict.fromkeys(self._group_of[turn_id] for turn_id in turns if turn_id in self._group_of)
        return [name for group_id in over for name in self._let_go(group_id)]

    def oldest_ms(self, waits: Container[str]) -> int | None:
        """Return when the earliest ready group was settled; None: no group is ready."""
        return min((one.at_ms for one in self._settled.values() if one.here(waits)), default=None)

    def choose(self, waits: Container[str], *, at_most: int, settled_before_ms: int) -> Mapping[str, float] | None:
        """Return the next batch as advantages by sample id, of as many whole groups as fit, but at least one.

        `waits` are the samples that wait; a ready group with none of them is over. None: it is not time yet, as fewer
        than `at_most` samples are ready and no group was settled before `settled_before_ms`.
        """
        advantages: dict[str, float] = {}
        num_ready, is_old = 0, False
        for group_id, one in list(self._settled.items()):
            here = one.here(waits)
            if here is None:
                continue
            if not here:
                self._let_go(group_id)
                continue
            num_ready += len(here)
            is_old = is_old or one.at_ms <= settled_before_ms
            if not advantages or num_ready <= at_most:
                advantages |= here
        return advantages if advantages and (is_old or num_ready >= at_most) else None

    def _let_go(self, group_id: str) -> list[str]:
        one = self._settled.pop(group_id)
        self._named[group_id] = frozenset()
        for step in one.steps:
            self._group_of.pop(step.turn_id, None)
        return [step.sample_id for step in one.steps]
