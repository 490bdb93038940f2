"""What the control topic says: which replays there are, and which one is promoted."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from clawstream.errors import ConfigError
from clawstream.events import Event, ReplayEnded, ReplayStarted, SamplesPromoted
from clawstream.events.control import promotions
from clawstream.stream.log import Arrived, Start
from clawstream.stream.stage import Record

CONTROL = "clawstream.control.v1"


class ControlLog(Protocol):
    """The part of a log that the registry needs."""

    async def append(self, events: Sequence[Event]) -> None: ...
    def follow(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncIterator[Sequence[Arrived]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """The control topic, read up to its end; of two events with one id the first counts."""

    started: dict[str, ReplayStarted] = field(default_factory=dict)  # by name, in order
    ended: dict[str, ReplayEnded] = field(default_factory=dict)
    promoted: dict[str, list[SamplesPromoted]] = field(default_factory=dict)  # by policy, all of them

    @classmethod
    async def read(cls, log: ControlLog) -> "Registry":
        """Read the topic up to its present end."""
        found = cls()
        async for records in log.follow([CONTROL], until_end=True):
            for event in (record.event for record in records if isinstance(record, Record)):
                match event:
                    case ReplayStarted():
                        found.started.setdefault(event.replay, event)
                    case ReplayEnded():
                        found.ended.setdefault(event.replay, event)
                    case SamplesPromoted():
                        found.promoted.setdefault(event.policy_id, []).append(event)
        return found

    def finished(self, name: str) -> ReplayEnded:
        """Return how the replay ended; raises ConfigError where it did not."""
        if name not in self.started:
            there = ", ".join(self.started) or "none"
            raise ConfigError(f"there is no replay {name!r}: there are {there}. See `clawstream replay list`")
        if name not in self.ended:
            raise ConfigError(
                f"replay {name!r} was begun and has not ended: nothing was done. Run `clawstream replay start --name "
                f"{name}` again, which finishes it"
            )
        return self.ended[name]

    def pointer(self, policy_id: str) -> str | None:
        """Return the promotion whose samples the policy is trained on; None: the live ones."""
        standing = promotions(self.promoted.get(policy_id, []))
        return standing[-1].replay if standing else None


async def promote(log: ControlLog, name: str, *, policy_id: str, now_ms: int) -> SamplesPromoted:
    """Have the policy trained on the replay's samples from its next batch on; raises ConfigError unless it ended."""
    registry = await Registry.read(log)
    registry.finished(name)
    event = _next(registry, policy_id, name, undoes=None, now_ms=now_ms)
    await log.append([event])
    return event


async def rollback(log: ControlLog, *, policy_id: str, now_ms: int) -> SamplesPromoted:
    """Undo the newest promotion that stands; raises ConfigError where none does."""
    registry = await Registry.read(log)
    standing = promotions(registry.promoted.get(policy_id, []))
    if not standing:
        raise ConfigError(f"nothing is promoted for policy {policy_id!r}: it is trained on its live samples already")
    before = standing[-2].replay if len(standing) > 1 else None
    event = _next(registry, policy_id, before, undoes=standing[-1].number, now_ms=now_ms)
    await log.append([event])
    return event


def _next(
    registry: Registry, policy_id: str, replay: str | None, *, undoes: int | None, now_ms: int
) -> SamplesPromoted:
    number = max((event.number for event in registry.promoted.get(policy_id, [])), default=0) + 1
    return SamplesPromoted(policy_id=policy_id, number=number, replay=replay, undoes=undoes, promoted_at_ms=now_ms)
