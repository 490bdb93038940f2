"""Every version of a policy, as the policy topic has it. Pure.

Of two events with one id the first counts, so what was first said of a version stays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from clawstream.events import (
    BatchPlanned,
    Event,
    PolicyActivated,
    PolicyPublished,
    PolicyRejected,
    StepRejected,
    StepTaken,
)

_OF_A_VERSION = (BatchPlanned, StepTaken, StepRejected, PolicyPublished, PolicyRejected, PolicyActivated)


class VersionState(StrEnum):
    """How far a version has come."""

    PLANNED = "planned"  # its step is still to be taken
    REJECTED = "rejected"  # the gate rejected its step's outcome
    PUBLISHED = "published"
    ACTIVE = "active"  # an engine serves it


@dataclass(slots=True, kw_only=True)
class VersionFacts:
    """What the policy topic says of one version; None: it does not say that."""

    version: int
    plan: BatchPlanned | None = None
    step: StepTaken | None = None
    published: PolicyPublished | None = None
    rejected: StepRejected | None = None
    engines: list[str] = field(default_factory=list)  # the engines that serve it
    refusals: list[PolicyRejected] = field(default_factory=list)  # by the engines that refused it

    @property
    def standing(self) -> VersionState:
        """How far the version has come."""
        if self.rejected is not None:
            return VersionState.REJECTED
        if self.engines:
            return VersionState.ACTIVE
        return VersionState.PUBLISHED if self.published is not None else VersionState.PLANNED

    @property
    def parent_version(self) -> int | None:
        """The version it was made from; None: the policy began with it."""
        return self.plan.parent_version if self.plan is not None else None

    @property
    def why(self) -> str | None:
        """Why the version is not as one would expect; None: it is."""
        if self.rejected is not None:
            return self.rejected.reason
        if self.refusals:
            return f"refused by {self.refusals[-1].engine}: {self.refusals[-1].reason}"
        if self.plan is not None and self.plan.rollback is not None:
            return f"back to version {self.plan.parent_version}"
        return None

    @property
    def at_ms(self) -> int | None:
        """When the newest of these facts was said."""
        if self.rejected is not None:
            return self.rejected.rejected_at_ms
        if self.published is not None:
            return self.published.published_at_ms
        return self.plan.planned_at_ms if self.plan is not None else None


def versions(events: Iterable[Event], policy_id: str) -> dict[int, VersionFacts]:
    """Return the policy's versions in order, by number."""
    found: dict[int, VersionFacts] = {}
    served: dict[str, int] = {}
    for event in events:
        if not isinstance(event, _OF_A_VERSION) or event.policy_id != policy_id:
            continue
        if isinstance(event, PolicyActivated):  # an engine serves one version: the last one it took over
            served[event.engine] = event.policy_version
            continue
        one = found.setdefault(event.policy_version, VersionFacts(version=event.policy_version))
        match event:
            case BatchPlanned():
                one.plan = one.plan or event
            case StepTaken():
                one.step = one.step or event
            case StepRejected():
                one.rejected = one.rejected or event
            case PolicyPublished():
                one.published = one.published or event
            case PolicyRejected():
                one.refusals.append(event)
    for engine, version in served.items():
        found.setdefault(version, VersionFacts(version=version)).engines.append(engine)
    return dict(sorted(found.items()))


def ancestors(known: dict[int, VersionFacts], version: int) -> Sequence[int]:
    """Return the versions that it was made from, the nearest first."""
    line: list[int] = []
    parent = known[version].parent_version
    while parent is not None and parent in known and parent not in line:
        line.append(parent)
        parent = known[parent].parent_version
    return line


def newest(known: dict[int, VersionFacts]) -> int | None:
    """Return the newest version that was published."""
    return max((number for number, one in known.items() if one.published is not None), default=None)
