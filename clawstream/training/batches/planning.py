"""Which samples make up the next batch. Pure: time and versions come in as arguments.

Every sample is in at most one batch, however often it is read: a plan on the log is executed as it stands, and no later
plan takes its samples. Of each turn and judge at most one revision is planned: the newest one read by then. A later one
may have its prompt answered again; until the log asks for that, plans' offsets stay below it, so a restart reads it.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import TypeVar

from clawstream.events import NOBODY, BatchPlanned, GroupSettled, PlannedTurn, SampleAssembled, TopicOffset, is_ours
from clawstream.training.batches.choosing import (
    Arrival,
    BatchRules,
    Merging,
    choose,
    corrected_hint,
    corrects,
    due_ms,
    offsets_before,
    retired,
    to_correct,
)
from clawstream.training.batches.progress import first_plans, versions_behind
from clawstream.training.batches.trainable import SettledGroups, flaw, hint_counts

REHEARSED_WITHIN_VERSIONS = 1  # a rehearsal that is more versions behind is dropped: it shows an older policy
T = TypeVar("T")
_Judge = tuple[str, str]  # the judge and its prompt's version
_Revision = tuple[bool, int, int]  # a later revision is greater
_Answer = tuple[str, str, str]  # the answer's id, then its `_Judge`


class DropReason(StrEnum):
    """Why a sample that arrived is in no batch of ours."""

    REPEATED = "repeated"  # a sample with its id came before: the first in the partition counts
    LATE = "late"  # another revision of its turn is in a plan
    SUPERSEDED = "superseded"  # a newer revision of its turn came
    STALE = "stale"  # sampled too many versions ago
    OVERTAKEN = "overtaken"  # a rehearsal that was answered more than one version ago
    RETIRED = "retired"  # a rehearsal of a hint that is not held any more
    NO_SIGNAL = "no_signal"  # it holds only signals to which this method gives no weight
    OTHER_POLICY = "other_policy"
    UNGROUPED = "ungrouped"  # it belongs to no group, and this method trains only groups
    LEFT_OUT = "left_out"  # its group was settled without it
    UNSETTLED = "unsettled"  # it waited too long for its group to be settled
    UNTRAINABLE = "untrainable"  # no step can be taken on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The content of a plan: samples in training order, and the offset from which each partition is read after it."""

    samples: tuple[SampleAssembled, ...]
    offsets: tuple[TopicOffset, ...]
    advantages: tuple[float, ...] | None = None  # one per sample; None: they follow from the rewards


class Batcher:
    """Collects samples in the order in which they are read, and gives each one out once.

    `planned` is every plan of this policy on the log; plans after `executed_version`, except the `rejected`, are still
    to be executed. Reading starts at `resume_offsets(planned, executed_version)`.
    """

    def __init__(
        self, rules: BatchRules, planned: Iterable[BatchPlanned] = (), *,
        executed_version: int = 0, rejected: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.dropped: Counter[DropReason] = Counter()
        self._rules = rules
        self._rejected = set(rejected)  # versions that were never published
        self._waiting: dict[str, Arrival] = {}  # by sample id, in order of arrival
        self._read: dict[tuple[str, int], int] = {}  # partition -> next offset to read
        self._taken: set[str] = set()  # in a plan
        self._stale: set[str] = set()  # dropped as too old; a later revision of their turns may still be planned
        self._turns: defaultdict[str, dict[_Judge, _Revision]] = defaultdict(dict)  # planned revisions, by answer
        self._revisions: defaultdict[str, set[str]] = defaultdict(set)  # ids of waiting samples, by answer
        self._newest: dict[_Answer, _Revision] = {}  # the newest revision of answers with feedback
        self._late: dict[str, Arrival] = {}  # late samples whose prompts are to be answered again, by turn
        self._asked = set[tuple[str, str | None]]()  # turns, and words, that are not to be answered again any more
        self._taken_back: set[str] = set()  # hints of corrections that were replaced before they were trained on
        self._refused: set[str] = set()  # sessions of requests whose answers are no samples
        self._groups = SettledGroups()
        self._of_group: defaultdict[str | None, set[str]] = defaultdict(set)  # ids of waiting samples, by group
        self._is_current = False  # whether everything is read that stood on the log when reading began
        self._chosen: dict[str, Arrival] = {}  # the samples that `due` returned last; their plan is being written
        self._pending: list[BatchPlanned] = []
        self._found: dict[str, SampleAssembled] = {}  # samples of pending plans, by id
        for plan in first_plans(planned):
            self._take(plan)
            self._read |= {(o.topic, o.partition): o.next_offset for o in plan.offsets}
            if plan.policy_version > executed_version and plan.policy_version not in self._rejected:
                self._pending.append(plan)
        self._wanted = {name for plan in self._pending for name in plan.sample_ids}

    def receive(self, arrival: Arrival) -> DropReason | None:
        """Take in one record of the samples topic; return why no new batch will have its sample, None where one may."""
        where = (arrival.topic, arrival.partition)
        if not arrival.again:
            self._read[where] = max(self._read.get(where, 0), arrival.offset + 1)
        reason = self._refusal(arrival.sample)
        name = arrival.sample.sample_id
        if name in self._wanted:
            self._found.setdefault(name, arrival.sample)
        elif reason is None:
            self._wait(arrival)
        else:
            self.dropped[reason] += 1
            if reason is DropReason.LATE:
                self._keep_late(arrival)
            if reason is DropReason.NO_SIGNAL:
                self._supersede(arrival.sample)  # it takes back the older revision's signal
        return reason

    def read_again(self, starts: Mapping[tuple[str, int], int]) -> None:
        """Note that these partitions are read again from offsets before a plan's end."""
        self._read |= starts

    def learn(self, event: GroupSettled, at_ms: int) -> None:
        """Take in a group's settlement, which the broker appended at `at_ms`."""
        self._groups.learn(event, at_ms)
        self._groups.end(step.turn_id for step in event.advantages if step.turn_id in self._turns)
        here = self._of_group.get(event.group_id, ())
        self._drop([n for n in here if self._groups.leaves_out(self._waiting[n].sample)], DropReason.LEFT_OUT)

    def read_past(self, group_ids: Iterable[str]) -> None:
        """Note that reading has reached the ends that the log had when reading began and after these settlements."""
        self._is_current = True
        self._groups.read_past(group_ids)

    def flaw(self, sample: SampleAssembled) -> str | None:
        """Return why the sample can't be trained on; None: it can, or it would not be trained on here anyway."""
        ours = self.wants(sample.sample_id) or self._refusal(sample) in (None, DropReason.UNTRAINABLE)
        return flaw(sample, self._rules.limits) if ours else None

    def concerns(self, sample: SampleAssembled) -> bool:
        """Return whether the sample is of the policy whose batches these are."""
        return is_ours(sample.policy_id, self._rules.policy_id, by_key=self._rules.of_keys_too)

    def wants(self, sample_id: str) -> bool:
        """Return whether a plan that is still to be executed names the sample."""
        return sample_id in self._wanted

    def holds(self, sample_id: str) -> bool:
        """Return whether the sample is still to be trained on: it waits, or a pending plan names it."""
        return sample_id in self._waiting or sample_id in self._wanted

    def pending(self) -> tuple[BatchPlanned, tuple[SampleAssembled, ...] | None] | None:
        """Return the oldest plan that is still to be executed, with its samples once all of them are read again."""
        if not self._pending:
            return None
        plan = self._pending[0]
        return plan, None if self.missing(plan) else tuple(self._found[name] for name in plan.sample_ids)

    def missing(self, plan: BatchPlanned) -> list[str]:
        """Return the ids of a pending plan's samples that were not read."""
        return [name for name in plan.sample_ids if name not in self._found]

    def executed(self, plan: BatchPlanned, *, rejected: bool = False) -> None:
        """Note that the oldest pending plan's step is taken or rejected, and let go of its samples."""
        assert self._pending, f"version {plan.policy_version} was executed, but no plan is pending"
        assert self._pending[0].policy_version == plan.policy_version, "plans are executed in their order"
        self._pending.pop(0)
        if rejected:
            self._rejected.add(plan.policy_version)
        self._wanted.difference_update(plan.sample_ids)
        self._found = {name: sample for name, sample in self._found.items() if name not in plan.sample_ids}

    def due(
        self, *, parent_version: int, now_ms: int, merging: Merging | None = None, held: Collection[str] | None = None
    ) -> Batch | None:
        """Return the batch to plan now, if there is one; its samples keep waiting until `plan` is called.

        A newer revision that is read meanwhile is late if the plan reaches the log, else it replaces the older one.
        Rehearsals of hints that are not `held` (None: any is) are dropped, but not those of a correction that waits.
        `now_ms` is compared with times on the log. While a plan is pending, no batch is due: steps run one by one.
        """
        self._drop_old(parent_version, now_ms)
        self._drop(retired(self._waiting, held, said=self._open), DropReason.RETIRED)
        if self._pending or not self._waiting:
            return None
        if self._rules.grouped:
            advantages = self._groups.choose(
                self._waiting, at_most=self._rules.batch_samples, settled_before_ms=now_ms - self._rules.max_wait_ms
            )
            return None if advantages is None else self._batch(advantages, tuple(advantages.values()))
        chosen = choose(self._waiting, self._rules, now_ms=now_ms, merging=merging, refused=self._refused)
        return self._batch(chosen) if chosen else None

    def plan(self, plan: BatchPlanned) -> None:
        """Note that the plan is on the log: it is to be executed, and its samples are taken."""
        self._take(plan)
        self._pending.append(plan)
        self._wanted.update(plan.sample_ids)
        for name in plan.sample_ids:
            arrival = self._let_go(name) or self._chosen.get(name)
            if arrival is None:
                continue
            self._found[name] = arrival.sample
            self._asked.add((arrival.sample.turn_id, arrival.sample.hint))
            for late in self._rivals(arrival.sample):
                self._drop([late.sample.sample_id], DropReason.LATE)
                self._keep_late(late)
        self._chosen = {}
        self._refused &= frozenset().union(*(one.asked for one in self._waiting.values()))
        self._drop(self._groups.end(turn.turn_id for turn in plan.turns), DropReason.LEFT_OUT)

    def to_refresh(self) -> tuple[Arrival, ...]:
        """Return the late samples whose prompts are to be answered again, at most one for each turn."""
        return tuple(self._late.values())

    def asked(self, arrivals: Iterable[Arrival]) -> None:
        """Note that the log now asks for new answers to these samples' prompts."""
        for arrival in arrivals:
            self._late.pop(arrival.sample.turn_id, None)
            self._asked.add(self._rules.asked_once(arrival.sample))

    @property
    def num_waiting(self) -> int:
        """The number of samples that wait for a batch."""
        return len(self._waiting)

    def to_correct(self) -> tuple[SampleAssembled, ...]:
        """Return the corrections whose answers are to be asked for now."""
        return to_correct(self._waiting.values(), self._rules)

    def corrected(self, asked: Mapping[str, frozenset[str]], now_ms: int) -> None:
        """Note in which sessions these corrections' answers were asked for; one replaced meanwhile is ignored."""
        for name in self._waiting.keys() & asked.keys():
            self._waiting[name] = replace(self._waiting[name], asked_ms=now_ms, asked=asked[name])

    def refused(self, session_id: str) -> None:
        """Note that the answer to the request in this session is no sample."""
        self._refused.add(session_id)

    @property
    def due_ms(self) -> int | None:
        """When the waiting samples become a batch if no others come; None: never."""
        if self._rules.grouped:
            settled_ms = self._groups.oldest_ms(self._waiting)
            return None if settled_ms is None else settled_ms + self._rules.max_wait_ms
        return due_ms(self._waiting, self._rules)

    def _refusal(self, sample: SampleAssembled) -> DropReason | None:
        rules = self._rules
        if any(sample.sample_id in known for known in (self._taken, self._stale, self._waiting)):
            return DropReason.REPEATED
        if not self.concerns(sample):
            return DropReason.OTHER_POLICY
        if sample.hint_id in self._taken_back:
            return DropReason.SUPERSEDED
        if any(_is_one(judge, _judge(sample)) for judge in self._turns.get(sample.answer_id, ())):
            return DropReason.LATE
        if not rules.grouped:
            revision = _revision(sample)
            others = (self._newest.get(_answer(sample), revision), *(_revision(r.sample) for r in self._rivals(sample)))
            if max(others) > revision:
                return DropReason.SUPERSEDED
            rewarded = sample.learned_reward is not None and rules.rewards_count
            if not rewarded and not (rules.hints_count and hint_counts(sample, by_engine=rules.by_engine)):
                return DropReason.NO_SIGNAL
        elif sample.group_id is None:
            return DropReason.UNGROUPED
        elif self._groups.leaves_out(sample):
            return DropReason.LEFT_OUT
        return DropReason.UNTRAINABLE if flaw(sample, rules.limits) is not None else None

    def _batch(self, names: Iterable[str], advantages: tuple[float, ...] | None = None) -> Batch:
        self._chosen = {name: self._waiting[name] for name in names}
        samples = tuple(arrival.sample for arrival in self._chosen.values())
        left = chain(self._late.values(), (one for name, one in self._waiting.items() if name not in self._chosen))
        return Batch(samples=samples, offsets=offsets_before(left, self._read), advantages=advantages)

    def _keep_late(self, arrival: Arrival) -> None:
        """Have the turn's prompt answered again, once, where the late sample is newer than the planned revision."""
        sample = arrival.sample
        planned = self._turns.get(sample.answer_id, {}).items()
        is_new = self._rules.asked_once(sample) not in self._asked and sample.turn_id not in self._late
        counts = self._rules.answers_again(sample)
        if is_new and counts and all(r < _revision(sample) for judge, r in planned if _is_one(judge, _judge(sample))):
            self._late[sample.turn_id] = arrival

    def _rivals(self, sample: SampleAssembled) -> list[Arrival]:
        """Return the sample's waiting revisions; there may be several where groups count, or no judge was asked."""
        waiting = [self._waiting[name] for name in self._revisions.get(sample.answer_id, ())]
        return [other for other in waiting if _is_one(_judge(other.sample), _judge(sample))]

    def _wait(self, arrival: Arrival) -> None:
        """Let the sample wait in place of older revisions, as if it had come when they did."""
        sample = arrival.sample
        if self._rules.grouped:  # the group's settlement says which revision counts
            self._of_group[sample.group_id].add(sample.sample_id)
        else:
            since_ms = min([arrival.timestamp_ms, *(one.since_ms for one in self._supersede(sample))])
            arrival = replace(arrival, waits_since_ms=since_ms)
        self._waiting[sample.sample_id] = arrival
        if corrects(sample, self._rules):
            self._taken_back.discard(corrected_hint(sample))
        self._revisions[sample.answer_id].add(sample.sample_id)

    def _supersede(self, sample: SampleAssembled) -> list[Arrival]:
        if sample.num_feedback is not None:
            self._newest[_answer(sample)] = _revision(sample)
        older = self._rivals(sample)
        self._drop([arrival.sample.sample_id for arrival in older], DropReason.SUPERSEDED)
        if replaced := self._hints(one.sample for one in older) - self._hints([sample]):
            self._take_back(replaced - self._open)
        return older

    @property
    def _open(self) -> set[str]:
        """The hints of the waiting corrections."""
        return self._hints(one.sample for one in self._waiting.values()) if self._rules.corrects else set()

    def _hints(self, samples: Iterable[SampleAssembled]) -> set[str]:
        return {corrected_hint(sample) for sample in samples if corrects(sample, self._rules)}

    def _take_back(self, hint_ids: set[str]) -> None:
        """Drop answers to hints that were replaced before they were trained on; answers still to come are refused."""
        self._taken_back |= hint_ids
        answers = [name for name, one in self._waiting.items() if one.sample.hint_id in hint_ids]
        self._drop(answers, DropReason.SUPERSEDED)

    def _drop(self, names: Iterable[str], reason: DropReason) -> None:
        """Drop those of the named samples that wait."""
        self.dropped.update(reason for name in names if self._let_go(name) is not None)

    def _let_go(self, name: str) -> Arrival | None:
        arrival = self._waiting.pop(name, None)
        if arrival is not None:
            _discard(self._revisions, arrival.sample.answer_id, name)
            _discard(self._of_group, arrival.sample.group_id, name)
        return arrival

    def _take(self, plan: BatchPlanned) -> None:
        self._taken.update(plan.sample_ids)
        for turn in plan.turns:
            self._turns[turn.turn_id][turn.judge, turn.prompt_version] = _revision(turn)

    def _drop_old(self, parent_version: int, now_ms: int) -> None:
        """Drop samples of versions too old for the parent, and samples whose groups were not settled in time."""
        waiting, unsettled_ms = self._waiting, self._rules.max_unsettled_ms
        kept = self._open  # the answers to a correction that waits are trained on with it, however old
        old = [
            name
            for name, arrival in waiting.items()
            if self._is_old(arrival.sample, parent_version) and arrival.sample.hint_id not in kept
        ]
        rehearsals = {name for name in old if waiting[name].sample.hint_id is not None}
        self._stale.update(old)
        self._drop([name for name in old if name not in rehearsals], DropReason.STALE)
        self._drop(rehearsals, DropReason.OVERTAKEN)
        if unsettled_ms is not None and self._is_current:
            old = [name for name, a in waiting.items() if now_ms - a.timestamp_ms > unsettled_ms]
            unsettled = [name for name in old if not self._groups.is_settled(waiting[name].sample)]
            self._drop(unsettled, DropReason.UNSETTLED)

    def _is_old(self, sample: SampleAssembled, parent_version: int) -> bool:
        behind = self._rules.max_versions_behind if sample.hint_id is None else REHEARSED_WITHIN_VERSIONS
        return behind is not None and versions_behind(sample, parent_version, self._rejected) > behind


def turn_of(sample: SampleAssembled) -> PlannedTurn:
    """Return a plan's entry for a sample: its answer, its judge, and which revision it is."""
    return PlannedTurn(
        turn_id=sample.answer_id,
        judge=sample.judge,
        prompt_version=sample.prompt_version,
        revision=sample.revision,
        num_feedback=sample.num_feedback,
    )


def _judge(sample: SampleAssembled) -> _Judge:
    return sample.judge, sample.prompt_version


def _answer(sample: SampleAssembled) -> _Answer:
    return sample.answer_id, *_judge(sample)


def _is_one(one: _Judge, other: _Judge) -> bool:
    """Return whether samples of these judges are revisions of one sample; NOBODY matches every judge."""
    return one == other or NOBODY in (one[0], other[0])


def _revision(of: SampleAssembled | PlannedTurn) -> _Revision:
    return of.judge != NOBODY, of.revision, of.num_feedback or 0


def _discard(names_by: dict[T, set[str]], key: T, name: str) -> None:
    names_by[key].discard(name)
    if not names_by[key]:
        del names_by[key]
