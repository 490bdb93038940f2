"""What the gateway reads of the log: sessions at start, and policy versions as they come."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from clawstream.errors import OperatorError, TryLater, UnusableExchange
from clawstream.events import Event, ExchangeCompleted, ExchangeFailed, PolicyActivated, SessionDone
from clawstream.events.conversation import parse
from clawstream.events.history import WholeRequest, whole
from clawstream.gateway.answers import SampledAnswers
from clawstream.gateway.closing import closing
from clawstream.gateway.engines import Engines
from clawstream.gateway.sessions import SessionIndex
from clawstream.gateway.wire import scope_of
from clawstream.inference.echoes import answered
from clawstream.stream.log import Arrived, Start
from clawstream.stream.stage import Record

E = TypeVar("E", bound=Event)
LOG = logging.getLogger(__name__)
EXCHANGES_TOPIC = "clawstream.exchanges.v1"
POLICY_TOPIC = "clawstream.policy.v1"
AGAIN_AFTER_S = 1.0


class Follows(Protocol):
    """The part of a log that is read here."""

    def follow(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncIterator[Sequence[Arrived]]:
        """Yield the records of all partitions from `start` on, in batches."""


async def learn_sessions(
    log: Follows, index: SessionIndex, answers: SampledAnswers, *, from_ms: int, spooled: Iterable[Event] = ()
) -> None:
    """Fold the exchanges since `from_ms` into what is known of sessions, so that they go on after a restart.

    After the log come the events that are `spooled`, on their way to it.
    """
    known: dict[str, WholeRequest] = {}
    num_unknown = 0
    async with closing(log.follow((EXCHANGES_TOPIC,), start=from_ms, until_end=True)) as batches:
        async for records in batches:
            num_unknown += _learn(_events(records, Event), known, index, answers)
    num_unknown += _learn(spooled, known, index, answers)
    LOG.info("sessions=learned exchanges=%d unknown_parents=%d answers=%d", len(known), num_unknown, len(index))


def _learn(
    events: Iterable[Event], known: dict[str, WholeRequest], index: SessionIndex, answers: SampledAnswers
) -> int:
    """Fold the events in, in their order; return how many rest on a parent that is not known."""
    num_unknown = 0
    for event in events:
        if isinstance(event, ExchangeCompleted | ExchangeFailed):
            index.claim(event.session_id, event.key_name, event.received_at_ms)
        if isinstance(event, SessionDone):
            answers.forget(event.session_id)
        elif isinstance(event, ExchangeCompleted):
            num_unknown += not _learn_exchange(event, known, index, answers)
    return num_unknown


def _learn_exchange(
    event: ExchangeCompleted, known: dict[str, WholeRequest], index: SessionIndex, answers: SampledAnswers
) -> bool:
    """Fold one exchange in; False where it rests on one that is older than the window."""
    if event.exchange_id in known:
        return True
    try:
        request = whole(replace(event.request, kept_tokens=0, token_ids=()), known)
        messages = tuple(map(parse, request.messages))
        answer = parse(event.message)
    except UnusableExchange:
        return False
    known[event.exchange_id] = request
    options = json.loads(request.options)
    scope = scope_of(options, event.key_name)
    index.asked(messages, scope, event.session_id, event.received_at_ms)
    index.answered(messages, answer, scope, event.session_id, event.exchange_id, event.finished_at_ms)
    sampled = answered(reversed(messages), options, answer, event.output_ids)
    answers.answered(event.session_id, sampled, event.finished_at_ms)
    return True


async def follow_policy(log: Follows, engines: Engines) -> None:
    """Tell `engines` of every version that is activated from now on; never returns."""
    while True:
        try:
            async with closing(log.follow((POLICY_TOPIC,), start="latest")) as batches:
                async for records in batches:
                    for event in _events(records, PolicyActivated):
                        engines.learn(event)
        except (TryLater, OperatorError) as error:
            LOG.warning("policy_topic=away reason=%s", error)
        await asyncio.sleep(AGAIN_AFTER_S)


def _events(records: Sequence[Arrived], kind: type[E]) -> list[E]:
    """Return the events of a kind; what can't be read is put aside by the stage that owns the topic."""
    return [record.event for record in records if isinstance(record, Record) and isinstance(record.event, kind)]
