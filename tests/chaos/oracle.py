"""Whether every promise was kept, from what was seen outside: by clients, on the log, in Postgres, on disk. Pure.

The one rule: nothing here asks the code under test what it thinks it did. Of two records with one id the first in the
partition counts, and both are compared.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from clawstream.events import (
    BatchPlanned,
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    HintAbsent,
    HintFound,
    PolicyPublished,
    SampleAssembled,
    SampleRefused,
    StepTaken,
    TurnOrphaned,
    TurnPaired,
    VerdictReached,
    VoteCast,
)
from clawstream.stream.stage import Record


class Promise(StrEnum):
    """What can be broken, as the report names it."""

    EXCHANGES_LOST = "exchanges_lost"
    TURNS_LOST = "turns_lost"
    SAMPLES_DUPLICATED = "samples_duplicated"
    SAMPLES_TRAINED_TWICE = "samples_trained_twice"
    ROWS_DIFFER = "rows_differ"
    ORDER_VIOLATIONS = "order_violations"
    REQUESTS_FAILED = "requests_failed_while_up"
    LOG_CONFLICTS = "log_conflicts"


STAGES = frozenset(("gateway", "turns", "judging", "samples", "project", "train", "weights"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An answer whose finish a client saw."""

    session_id: str
    turn: int
    exchange_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A group's offset that went back."""

    group: str
    topic: str
    partition: int
    was: int
    found: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """All that there is to see after a run."""

    seen: Sequence[Seen]
    records: Sequence[Record]  # of every topic, each partition's in order
    undecodable: Sequence[str] = ()
    rows: Mapping[str, frozenset[str]] = field(default_factory=dict)  # event ids by table
    rows_differ: int = 0  # as the audit says
    chain_breaks: int = 0
    marked_twice: Sequence[str] = ()  # places of the log that the projector has two marks of
    manifests: Mapping[int, BatchPlanned] = field(default_factory=dict)  # of the checkpoints, by version
    moved: Sequence[Moved] = ()
    failed: Sequence[str] = ()  # requests, while their gateway was up and had room
    stages: frozenset[str] = STAGES  # that ran


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One promise that was not kept, once."""

    promise: Promise
    what: str


TABLES: Mapping[str, tuple[type[Event], ...]] = {
    "exchanges": (ExchangeCompleted, ExchangeFailed),
    "turns": (TurnPaired, TurnOrphaned),
    "votes": (VoteCast,),
    "verdicts": (VerdictReached,),
    "hints": (HintFound, HintAbsent),
    "samples": (SampleAssembled,),
    "refusals": (SampleRefused,),
    "batches": (BatchPlanned,),
    "steps": (StepTaken,),
    "policies": (PolicyPublished,),
}


def findings(found: Collected) -> list[Finding]:
    """Return every promise that was not kept; none: all were."""
    log = _Log(found.records)
    broken = [
        *_exchanges(found.seen, log),
        *_turns(found.seen, log, found.stages),
        *_samples(log),
        *_steps(log, found.manifests, found.stages),
        *_conflicts(log),
        *_order(found.seen, log),
        *_rows(found, log),
    ]
    broken += [Finding(promise=Promise.REQUESTS_FAILED, what=what) for what in found.failed]
    broken += [Finding(promise=Promise.LOG_CONFLICTS, what=f"an offset went back: {moved}") for moved in found.moved]
    broken += [Finding(promise=Promise.LOG_CONFLICTS, what=f"undecodable: {what}") for what in found.undecodable]
    return broken


def counts(broken: Iterable[Finding]) -> dict[str, int]:
    """Return how often each promise was not kept, in the report's order."""
    counted = Counter(finding.promise for finding in broken)
    return {promise.value: counted[promise] for promise in Promise}


class _Log:
    """The records by what they say."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.copies: dict[tuple[str, str], list[Record]] = defaultdict(list)
        for record in records:
            self.copies[record.topic, record.event.event_id].append(record)
        self.firsts = [copies[0] for copies in self.copies.values()]
        self.completed = {
            record.event.exchange_id: record for record in self.firsts if isinstance(record.event, ExchangeCompleted)
        }

    def of(self, *kinds: type[Event]) -> list[Event]:
        """Return the events of some kinds, repeats left out."""
        return [record.event for record in self.firsts if isinstance(record.event, kinds)]


def _exchanges(seen: Sequence[Seen], log: _Log) -> Iterable[Finding]:
    for one in seen:
        record = log.completed.get(one.exchange_id)
        if record is None or not isinstance(record.event, ExchangeCompleted):
            yield Finding(promise=Promise.EXCHANGES_LOST, what=f"{one} is not on the log")
        elif one.text.encode() not in record.event.message or record.event.session_id != one.session_id:
            yield Finding(promise=Promise.EXCHANGES_LOST, what=f"{one} is {record.event.message!r} on the log")


def _turns(seen: Sequence[Seen], log: _Log, stages: frozenset[str]) -> Iterable[Finding]:
    paired = {event.turn_id for event in log.of(TurnPaired) if isinstance(event, TurnPaired)}
    for session in _by_session(seen).values() if "turns" in stages else ():
        echoed = {one.turn for one in session}
        for one in session:
            if one.turn + 1 in echoed and one.exchange_id not in paired:
                yield Finding(promise=Promise.TURNS_LOST, what=f"{one} was echoed, and is not paired")
    if "samples" not in stages:
        return
    outcomes = {
        event.turn_id for event in log.of(SampleAssembled, SampleRefused)
        if isinstance(event, (SampleAssembled, SampleRefused))
    }  # fmt: skip
    judged = {event.turn_id for event in log.of(VerdictReached) if isinstance(event, VerdictReached)}
    for turn_id in sorted(paired - outcomes):
        why = "has a verdict and no sample" if turn_id in judged else "has no verdict"
        yield Finding(promise=Promise.TURNS_LOST, what=f"turn {turn_id} is paired, {why}")


def _samples(log: _Log) -> Iterable[Finding]:
    by_look: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for event in log.of(SampleAssembled, SampleRefused):
        assert isinstance(event, (SampleAssembled, SampleRefused))
        if event.turn_id is not None:
            by_look[event.turn_id, event.judge, event.prompt_version, event.revision].add(event.event_id)
    for look, ids in by_look.items():
        if len(ids) > 1:
            yield Finding(promise=Promise.SAMPLES_DUPLICATED, what=f"{look} has the outcomes {sorted(ids)}")


def _steps(log: _Log, manifests: Mapping[int, BatchPlanned], stages: frozenset[str]) -> Iterable[Finding]:
    plans = {event.policy_version: event for event in log.of(BatchPlanned) if isinstance(event, BatchPlanned)}
    samples = {event.event_id for event in log.of(SampleAssembled)}
    # What was executed is what the manifests say; the log's plan stands for a version whose checkpoint is gone.
    executed = {version: manifests.get(version, plan) for version, plan in plans.items()} | dict(manifests)
    times = Counter(name for plan in executed.values() for name in plan.sample_ids)
    for name, number in times.items():
        if number > 1:
            yield Finding(promise=Promise.SAMPLES_TRAINED_TWICE, what=f"sample {name} is in {number} steps")
        if name not in samples:
            yield Finding(promise=Promise.LOG_CONFLICTS, what=f"sample {name} was trained on and is not on the log")
    for version, manifest in manifests.items():
        if plans.get(version) != manifest:
            what = f"version {version} was not made of the plan that stands first on the log"
            yield Finding(promise=Promise.LOG_CONFLICTS, what=what)
    for step in log.of(StepTaken):
        assert isinstance(step, StepTaken)
        plan = plans.get(step.policy_version)
        if plan is None or len(plan.sample_ids) != step.num_samples:
            what = f"step {step.policy_version} of {step.num_samples} samples is not the one that was planned"
            yield Finding(promise=Promise.LOG_CONFLICTS, what=what)
    for name in sorted(samples - set(times)) if "train" in stages else ():
        yield Finding(promise=Promise.TURNS_LOST, what=f"sample {name} is in no step")


def _conflicts(log: _Log) -> Iterable[Finding]:
    for (topic, event_id), copies in log.copies.items():
        kind = type(copies[0].event).__name__
        if len({(record.partition, record.key) for record in copies}) > 1:
            yield Finding(promise=Promise.LOG_CONFLICTS, what=f"{kind} {event_id} stands on two partitions of {topic}")
        elif any(_account(record.event) != _account(copies[0].event) for record in copies[1:]):
            yield Finding(promise=Promise.LOG_CONFLICTS, what=f"{kind} {event_id} on {topic} says two things")
    completed = set(log.completed)
    for event in log.of(ExchangeFailed):
        if isinstance(event, ExchangeFailed) and event.exchange_id in completed:
            what = f"exchange {event.exchange_id} is completed and failed ({event.reason})"
            yield Finding(promise=Promise.LOG_CONFLICTS, what=what)
    fates = Counter(
        event.turn_id for event in log.of(TurnPaired, TurnOrphaned) if isinstance(event, (TurnPaired, TurnOrphaned))
    )
    for turn_id, number in fates.items():
        if number > 1:
            yield Finding(promise=Promise.LOG_CONFLICTS, what=f"turn {turn_id} is both paired and orphaned")


def _account(event: Event) -> object:
    """Return what an event must say alike each time that it is written.

    A vote that is asked for again is another reply to the same question: the first counts, and what follows from votes
    is compared. When a version was published is not part of the version.
    """
    if isinstance(event, VoteCast):
        return event.event_id
    return replace(event, published_at_ms=0) if isinstance(event, PolicyPublished) else event


def _order(seen: Sequence[Seen], log: _Log) -> Iterable[Finding]:
    for session_id, answers in _by_session(seen).items():
        offsets = [log.completed[one.exchange_id].offset for one in answers if one.exchange_id in log.completed]
        if offsets != sorted(offsets):
            what = f"session {session_id}: its answers stand at {offsets}"
            yield Finding(promise=Promise.ORDER_VIOLATIONS, what=what)
    turns: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for record in log.firsts:
        event = record.event
        if isinstance(event, TurnPaired) and event.turn_id in log.completed:
            turns[event.session_id].append((record.offset, event.turn_id))
    for session_id, pairs in turns.items():
        places = [log.completed[turn_id].offset for _, turn_id in sorted(pairs)]
        if places != sorted(places):
            what = f"session {session_id}: its turns follow the answers at {places}"
            yield Finding(promise=Promise.ORDER_VIOLATIONS, what=what)


def _rows(found: Collected, log: _Log) -> Iterable[Finding]:
    for table, kinds in TABLES.items():
        if table not in found.rows:
            continue
        on_log = {event.event_id for event in log.of(*kinds)}
        for event_id in sorted(on_log ^ found.rows[table]):
            where = "on the log and not in" if event_id in on_log else "not on the log and in"
            yield Finding(promise=Promise.ROWS_DIFFER, what=f"{event_id} is {where} the table {table}")
    for _ in range(found.rows_differ):
        yield Finding(promise=Promise.ROWS_DIFFER, what="a row differs, says the audit")
    for place in found.marked_twice:
        yield Finding(promise=Promise.ROWS_DIFFER, what=f"{place} was written twice, says the projector's progress")
    for _ in range(found.chain_breaks):
        yield Finding(promise=Promise.ROWS_DIFFER, what="the hash chain is broken, says the audit")


def _by_session(seen: Sequence[Seen]) -> dict[str, list[Seen]]:
    sessions: dict[str, list[Seen]] = defaultdict(list)
    for one in sorted(seen, key=lambda one: one.turn):
        sessions[one.session_id].append(one)
    return sessions
