"""The state of a policy: every version, which one is served, and the samples that wait for a batch. Pure.

Of two events with one id the first counts, so what was said first of a version stays. A batch's plan names its samples
and, for each partition, the offset up to which samples are used up. Plans and samples are on two topics, so either may
be read first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import add
from typing import NamedTuple

from clawstream import events
from clawstream.events import Event
from clawstream.monitoring.alarm import BatchRule, Outcome, Planned, TrainerSign, overdue, recent, standstill, unplanned
from clawstream.stream.stage import Record

_OF_A_VERSION = (
    events.BatchPlanned,
    events.StepTaken,
    events.StepRejected,
    events.PolicyPublished,
    events.PolicyRejected,
    events.PolicyActivated,
)
PLANNED_KEPT = 8192  # keys of planned answers, two for each; the samples of older ones lie below `used_up` anyway


class VersionState(StrEnum):
    """How far a version has come."""

    PLANNED = "planned"  # it is not published yet
    REJECTED = "rejected"  # the gate rejected its step
    PUBLISHED = "published"
    ACTIVE = "active"  # an engine serves it


@dataclass(slots=True, kw_only=True)
class VersionFacts:
    """The events of one version on the policy topic; None: there is no such event."""

    version: int
    plan: events.BatchPlanned | None = None
    step: events.StepTaken | None = None
    published: events.PolicyPublished | None = None
    rejected: events.StepRejected | None = None
    engines: list[str] = field(default_factory=list)  # the engines that serve it
    refusals: list[events.PolicyRejected] = field(default_factory=list)  # by the engines that refused it

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
        """The version that this one was made from; None: no plan names one, as for the base."""
        return self.plan.parent_version if self.plan is not None else None

    @property
    def why(self) -> str | None:
        """Why the gate or an engine rejected it, or to which version it goes back; None: neither applies."""
        if self.rejected is not None:
            return self.rejected.reason
        if self.refusals:
            return f"refused by {self.refusals[-1].engine}: {self.refusals[-1].reason}"
        if self.plan is not None and self.plan.rollback is not None:
            return f"back to version {self.plan.parent_version}"
        return None

    @property
    def at_ms(self) -> int | None:
        """When it was rejected, or else published, or else planned; None: none of these is known."""
        if self.rejected is not None:
            return self.rejected.rejected_at_ms
        if self.published is not None:
            return self.published.published_at_ms
        return self.plan.planned_at_ms if self.plan is not None else None


def versions(history: Iterable[Event], policy_id: str) -> dict[int, VersionFacts]:
    """Return the policy's versions in order, by number."""
    found: dict[int, VersionFacts] = {}
    served: dict[str, int] = {}
    for event in history:
        if not isinstance(event, _OF_A_VERSION) or event.policy_id != policy_id:
            continue
        if isinstance(event, events.PolicyActivated):  # an engine serves one version: the last one it took over
            served[event.engine] = event.policy_version
            continue
        one = found.setdefault(event.policy_version, VersionFacts(version=event.policy_version))
        match event:
            case events.BatchPlanned():
                one.plan = one.plan or event
            case events.StepTaken():
                one.step = one.step or event
            case events.StepRejected():
                one.rejected = one.rejected or event
            case events.PolicyPublished():
                one.published = one.published or event
            case events.PolicyRejected():
                one.refusals.append(event)
    for engine, version in served.items():
        found.setdefault(version, VersionFacts(version=version)).engines.append(engine)
    return dict(sorted(found.items()))


def ancestors(known: dict[int, VersionFacts], version: int) -> Sequence[int]:
    """Return the versions that `version` was made from, the nearest first."""
    line: list[int] = []
    parent = known[version].parent_version
    while parent is not None and parent in known and parent not in line:
        line.append(parent)
        parent = known[parent].parent_version
    return line


def newest(known: dict[int, VersionFacts]) -> int | None:
    """Return the newest version that was published."""
    return max((number for number, one in known.items() if one.published is not None), default=None)


class _Answer(NamedTuple):
    turn_id: str
    judge: str
    prompt_version: str


class _SampleOffset(NamedTuple):
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    sample_id: str


class LearnedFrom(NamedTuple):
    """How many samples the steps learned from, by their signals."""

    samples: int = 0
    with_feedback: int = 0  # from a person (a thumb, a score, words) or a heuristic
    judged: int = 0  # by a judge, with feedback or without
    hinted: int = 0


class PolicyBoard:
    """What the policy topic and the samples topic say of one policy so far.

    A sample that the trainer drops (too old, or without weight in its method) counts as waiting until a plan's offsets
    pass it. All samples of one answer by one judge and prompt version count as one sample, which waits from when the
    first of them came until a plan names it. A sample without a judge gives way to one with a judge.
    """

    def __init__(self, policy_id: str, due: BatchRule | None = None) -> None:
        """`due` says when a batch is due; None: not known, as with groups, so only the number of samples counts."""
        self._policy_id = policy_id
        self._due = due
        self._waiting: dict[_Answer, _SampleOffset] = {}
        self._planned: dict[str | _Answer, None] = {}  # in order of planning: turns, and turns with their judge
        self._newest_plan: Planned | None = None
        self._used_up: dict[tuple[str, int], int] = {}
        self._next_offsets: dict[tuple[str, int], int] = {}
        self.published_version: int | None = None  # the newest one
        self.active_versions: dict[str, int] = {}  # by engine
        self._outcomes: list[Outcome] = []  # of the newest steps
        self._planned_from: dict[int, LearnedFrom] = {}  # by version, of plans whose step is still to come
        self.learned_from = LearnedFrom()
        self.trainer: TrainerSign | None = None  # None: nothing on the log is the trainer's
        self.rejected: events.StepRejected | None = None  # the newest one; None once a later step is published

    @property
    def used_up(self) -> dict[tuple[str, int], int]:
        """By partition, the first offset that may have an unplanned sample; without partitions that no plan used."""
        return dict(self._used_up)

    @property
    def num_waiting(self) -> int:
        """The number of samples that wait for a plan."""
        return len(self._waiting)

    @property
    def oldest_ms(self) -> int | None:
        """When the broker appended the oldest waiting sample; None: none waits."""
        return min((sample.timestamp_ms for sample in self._waiting.values()), default=None)

    def alarm(self, now_ms: int) -> str | None:
        """Return why learning stands still, in words for people; None: it does not, or too few samples came."""
        came_ms = [sample.timestamp_ms for sample in self._waiting.values()]
        if self._due is None:
            waits = unplanned(came_ms, self._newest_plan, now_ms)
        else:
            waits = overdue(came_ms, self._due, self.trainer, now_ms)
        return waits or standstill(self._outcomes)

    def learn(self, record: Record) -> None:
        """Take in one record of either topic. A record that was taken in before changes nothing."""
        place = (record.topic, record.partition)
        if record.offset < self._next_offsets.get(place, 0):
            return
        self._next_offsets[place] = record.offset + 1
        match event := record.event:
            case events.SampleAssembled(policy_id=self._policy_id, hint_id=None):  # rehearsals make no batch
                self._wait(event, _SampleOffset(*place, record.offset, record.timestamp_ms, event.sample_id))
            case events.BatchPlanned(policy_id=self._policy_id):
                self._plan(event, record.timestamp_ms)
                self._see(f"version {event.policy_version} planned", record, in_step=True)
            case events.StepTaken(policy_id=self._policy_id):
                self._see(f"version {event.policy_version} trained", record)
                self._learned(event)
                self._outcomes = recent([*self._outcomes, event])
            case events.StepRejected(policy_id=self._policy_id):
                self._planned_from.pop(event.policy_version, None)
                self.rejected = event
                self._see(f"version {event.policy_version} rejected", record)
                self._outcomes = recent([*self._outcomes, event])
            case events.PolicyPublished(policy_id=self._policy_id):
                self.rejected = None
                self._see(f"version {event.policy_version} published", record)
                self.published_version = max(event.policy_version, self.published_version or 0)
            case events.PolicyActivated(policy_id=self._policy_id):
                self.active_versions[event.engine] = event.policy_version

    def _learned(self, step: events.StepTaken) -> None:
        planned = self._planned_from.pop(step.policy_version, None)
        if planned is not None:
            of_step = planned._replace(hinted=step.num_hinted)
            self.learned_from = LearnedFrom(*map(add, self.learned_from, of_step))

    def _see(self, what: str, record: Record, *, in_step: bool = False) -> None:
        self.trainer = TrainerSign(what, record.timestamp_ms, in_step)

    def _wait(self, sample: events.SampleAssembled, where: _SampleOffset) -> None:
        answer = _Answer(sample.answer_id, sample.judge, sample.prompt_version)
        if self._is_planned(answer) or self._is_used_up(where):
            return
        if answer.judge == events.NOBODY and any(
            one.turn_id == answer.turn_id and one != answer for one in self._waiting
        ):
            return
        if answer.judge != events.NOBODY:  # replaces the turn's sample without a judge, and inherits its time
            unjudged = self._waiting.pop(_of_nobody(answer), where)
            where = where._replace(timestamp_ms=unjudged.timestamp_ms)
        before = self._waiting.get(answer, where)
        is_revision = before.sample_id != where.sample_id
        self._waiting[answer] = where._replace(timestamp_ms=before.timestamp_ms) if is_revision else before

    def _is_planned(self, answer: _Answer) -> bool:
        """Return whether a plan names the answer, by the same judge or where one of the two is without a judge."""
        any_judge = answer.turn_id if answer.judge == events.NOBODY else _of_nobody(answer)
        return answer in self._planned or any_judge in self._planned

    def _plan(self, plan: events.BatchPlanned, at_ms: int) -> None:
        if self._newest_plan is not None and plan.policy_version <= self._newest_plan.policy_version:
            return  # of two plans for a version the first counts
        self._planned_from[plan.policy_version] = LearnedFrom(
            samples=len(plan.turns),
            with_feedback=sum(bool(turn.num_feedback) for turn in plan.turns),
            judged=sum(turn.judge != events.NOBODY for turn in plan.turns),
        )
        self._newest_plan = Planned(plan.policy_version, len(plan.sample_ids), at_ms)
        for turn in plan.turns:
            self._planned |= {turn.turn_id: None, _Answer(turn.turn_id, turn.judge, turn.prompt_version): None}
        for end in plan.offsets:
            partition = (end.topic, end.partition)
            self._used_up[partition] = max(end.next_offset, self._used_up.get(partition, 0))
        for waiting, where in list(self._waiting.items()):
            if self._is_planned(waiting) or self._is_used_up(where):
                del self._waiting[waiting]
        while len(self._planned) > PLANNED_KEPT:
            del self._planned[next(iter(self._planned))]

    def _is_used_up(self, where: _SampleOffset) -> bool:
        return where.offset < self._used_up.get((where.topic, where.partition), 0)


def _of_nobody(answer: _Answer) -> _Answer:
    return _Answer(answer.turn_id, events.NOBODY, events.NOBODY)
