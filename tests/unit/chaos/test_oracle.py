"""The oracle finds nothing in a run that kept every promise, and says which one was broken where one was."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from clawstream.events import (
    BatchPlanned,
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    OrphanReason,
    SampleAssembled,
    StepTaken,
    TurnOrphaned,
    TurnPaired,
    VoteCast,
)
from clawstream.stream.stage import Record
from clawstream.stream.topics import POLICY
from tests.chaos.oracle import TABLES, Collected, Moved, Promise, Seen, counts, findings
from tests.flow import Flow
from tests.sessions import Session, assistant, record, user

Change = Callable[[Collected], Collected]


@cache
def kept() -> Collected:
    """A session of three turns that was paired, judged, joined and trained on."""
    session = Session()
    messages = [user("one?")]
    seen = []
    for turn, text in enumerate(("Answer 1.", "Answer 2.", "Answer 3.")):
        exchange = session.ask(messages, text)
        seen.append(Seen(session_id="s", turn=turn, exchange_id=exchange.exchange_id, text=text))
        messages = [*messages, assistant(text), user("and then?")]
    log = Flow().run(session.written)
    records = [one for topic in log.topics.values() for one in topic]
    ids = tuple(one.event.event_id for one in records if isinstance(one.event, SampleAssembled))
    assert ids
    plan = _plan(1, ids)
    records += [record(plan, POLICY, 0), record(_step(1, len(ids)), POLICY, 1)]
    return _with_rows(Collected(seen=tuple(seen), records=records, manifests={1: plan}))


def _plan(version: int, sample_ids: tuple[str, ...]) -> BatchPlanned:
    return BatchPlanned(
        policy_id="policy", policy_version=version, parent_version=version - 1, sample_ids=sample_ids, offsets=(),
        seed=version, settings=b"{}", planned_at_ms=1, turns=(),
    )  # fmt: skip


def _step(version: int, num_samples: int) -> StepTaken:
    return StepTaken(
        policy_id="policy", policy_version=version, num_samples=num_samples, num_hinted=0, num_rewarded=num_samples,
        num_tokens=1, num_tokens_dropped=0, loss_nats=None, kl_reference_nats=None, mean_gap_nats=None,
        mean_reward=None, clipped_share=None, grad_norm=None, learning_rate=0.0, mean_versions_behind=0.0,
        max_versions_behind=0, step_ms=1, taken_at_ms=1,
    )  # fmt: skip


def _with_rows(found: Collected) -> Collected:
    rows = {
        table: frozenset(one.event.event_id for one in found.records if isinstance(one.event, kinds))
        for table, kinds in TABLES.items()
    }
    return replace(found, rows=rows)


def _without(kind: type[Event], found: Collected) -> Collected:
    first = next(one for one in found.records if isinstance(one.event, kind))
    return _with_rows(replace(found, records=[one for one in found.records if one is not first]))


def _and(found: Collected, *more: Record) -> Collected:
    return _with_rows(replace(found, records=[*found.records, *more]))


def _first(found: Collected, kind: type[Event]) -> Record:
    return next(one for one in found.records if isinstance(one.event, kind))


def _again(kind: type[Event], found: Collected, **other: object) -> Collected:
    """Another record of an event's, at the end of its topic, that says something else."""
    first = _first(found, kind)
    return _and(found, first._replace(offset=1000, event=replace(first.event, **other)))


def _failed_too(found: Collected) -> Collected:
    done = _first(found, ExchangeCompleted).event
    assert isinstance(done, ExchangeCompleted)
    failed = replace(Session().fail([user("one?")]), exchange_id=done.exchange_id)
    assert isinstance(failed, ExchangeFailed)
    return _and(found, record(failed, offset=1000))


def _orphaned_too(found: Collected) -> Collected:
    turn = _first(found, TurnPaired)
    assert isinstance(turn.event, TurnPaired)
    orphan = TurnOrphaned(
        session_id="s", turn_id=turn.event.turn_id, next_exchange_id=turn.event.next_exchange_id,
        reason=OrphanReason.EDITED,
    )  # fmt: skip
    return _and(found, record(orphan, turn.topic, 1000))


def _trained_twice(found: Collected) -> Collected:
    plan = _plan(2, found.manifests[1].sample_ids)
    more = _and(found, record(plan, POLICY, 2), record(_step(2, len(plan.sample_ids)), POLICY, 3))
    return replace(more, manifests={**found.manifests, 2: plan})


def _another_plan(found: Collected) -> Collected:
    return replace(found, manifests={1: replace(found.manifests[1], seed=99)})


def _swapped(kind: type[Event], found: Collected) -> Collected:
    """The events of a kind stand in the opposite order; where these are the answers, no turn tells of it."""
    some = [one for one in found.records if isinstance(one.event, kind)]
    others = [one for one in found.records if not isinstance(one.event, (kind, TurnPaired))]
    places = reversed([one.offset for one in some])
    return replace(found, records=[*(one._replace(offset=at) for one, at in zip(some, places, strict=True)), *others])


def _row_gone(found: Collected) -> Collected:
    return replace(found, rows={**found.rows, "turns": frozenset(sorted(found.rows["turns"])[1:])})


def _row_too_many(found: Collected) -> Collected:
    return replace(found, rows={**found.rows, "turns": found.rows["turns"] | {"made up"}})


def test_a_run_that_kept_every_promise_has_no_findings() -> None:
    assert findings(kept()) == []


def test_what_is_written_again_as_it_was_breaks_nothing() -> None:
    found = kept()
    again = [one._replace(offset=one.offset + 1000) for one in found.records]
    assert findings(replace(found, records=[*found.records, *again])) == []


def test_a_vote_that_was_asked_for_again_may_say_something_else() -> None:
    assert findings(_again(VoteCast, kept(), text="another reply", latency_ms=77)) == []


@pytest.mark.parametrize(
    ("promise", "broken"),
    [
        (Promise.EXCHANGES_LOST, lambda found: _without(ExchangeCompleted, found)),
        (Promise.TURNS_LOST, lambda found: _without(TurnPaired, found)),
        (Promise.SAMPLES_TRAINED_TWICE, _trained_twice),
        (Promise.ROWS_DIFFER, _row_gone),
        (Promise.ROWS_DIFFER, _row_too_many),
        (Promise.ROWS_DIFFER, lambda found: replace(found, chain_breaks=1)),
        (Promise.ROWS_DIFFER, lambda found: replace(found, rows_differ=1)),
        (Promise.ROWS_DIFFER, lambda found: replace(found, marked_twice=("exchanges-0 offset 7",))),
        (Promise.ORDER_VIOLATIONS, lambda found: _swapped(ExchangeCompleted, found)),
        (Promise.ORDER_VIOLATIONS, lambda found: _swapped(TurnPaired, found)),
        (Promise.REQUESTS_FAILED, lambda found: replace(found, failed=("c0-0 turn 1",))),
        (Promise.LOG_CONFLICTS, lambda found: _again(TurnPaired, found, next_state=(9,))),
        (Promise.LOG_CONFLICTS, lambda found: _again(SampleAssembled, found, reward=None)),
        (Promise.LOG_CONFLICTS, _failed_too),
        (Promise.LOG_CONFLICTS, _orphaned_too),
        (Promise.LOG_CONFLICTS, _another_plan),
        (
            Promise.LOG_CONFLICTS,
            lambda found: replace(found, moved=(Moved(group="turns", topic="t", partition=0, was=2, found=1),)),
        ),
    ],
)
def test_a_promise_that_was_broken_is_named(promise: Promise, broken: Change) -> None:
    assert counts(findings(broken(kept())))[promise] >= 1


def test_a_turn_without_an_outcome_is_lost() -> None:
    found = kept()
    first = _first(found, SampleAssembled)
    records = [one for one in found.records if one is not first]
    assert counts(findings(replace(found, records=records)))[Promise.TURNS_LOST] >= 1


def test_an_answer_with_another_text_than_its_client_saw_is_lost() -> None:
    found = kept()
    seen = [replace(one, text="something else") for one in found.seen]
    assert counts(findings(replace(found, seen=seen)))[Promise.EXCHANGES_LOST] == 3
