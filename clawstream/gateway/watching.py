"""Reads the log for the gateway: sessions at start, and policy versions as they come."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import TypeVar

from clawstream.conversation.continuing import answered
from clawstream.conversation.history import WholeRequest, whole
from clawstream.conversation.messages import parse, role_of
from clawstream.errors import OperatorError, TryLater, UnusableExchange
from clawstream.events import Event, ExchangeCompleted, PolicyActivated, SessionDone, asker_of, is_ours
from clawstream.gateway.access.owners import Owners, SessionClaim, claim_of
from clawstream.gateway.answering.outlets import closing
from clawstream.gateway.dialects.responses import conversation_of
from clawstream.gateway.engines import Engines
from clawstream.gateway.requests.wire import scope_of
from clawstream.gateway.sessions import Conversations, SampledAnswers, SessionIndex
from clawstream.stream import topics
from clawstream.stream.avro import codec
from clawstream.stream.log import Arrived, Log, Raw, Start, arrived
from clawstream.stream.runner.calling import until_done
from clawstream.stream.stage import Record

E = TypeVar("E", bound=Event)
LOG = logging.getLogger(__name__)
AGAIN_AFTER_S = 1.0
_SAID_EVERY_S = 5.0


async def learn_sessions(
    log: Log,
    index: SessionIndex,
    answers: SampledAnswers,
    conversations: Conversations,
    owners: Owners,
    *,
    policy_id: str,
    by_key: bool = False,
    from_ms: int,
    spooled: Iterable[Event] = (),
) -> None:
    """Fold the exchanges since `from_ms` into the tables of sessions, so that these go on after a restart.

    The `spooled` events, which are on their way to the log, follow those of the log. While the log is away, this waits:
    a session that is not known yet could be mistaken for another, or taken by another key. Inconsistent exchanges are
    left out and logged in one line.
    """
    learning = SessionLearner(index, answers, conversations, owners, policy_id, by_key=by_key)

    async def read() -> None:  # what was read before the log went away stays known
        async with closing(log.follow((topics.EXCHANGES,), start=from_ms, until_end=True)) as batches:
            async for records in batches:
                learning.learn(_events(records, Event))

    async with _saying_that_it_waits():
        await until_done(read, "sessions=unread state=waiting", retry_s=AGAIN_AFTER_S, longest_s=AGAIN_AFTER_S)
    learning.learn(spooled)
    if learning.inconsistent:
        first, why = next(iter(learning.inconsistent.items()))
        LOG.warning(
            "sessions=left_out exchanges=%d first=%s reason=%s; their sessions go on without them",
            len(learning.inconsistent), first, why,
        )  # fmt: skip
    LOG.info(
        "sessions=learned exchanges=%d unknown_parents=%d answers=%d",
        len(learning.known), learning.num_unknown, len(index),
    )  # fmt: skip


@asynccontextmanager
async def _saying_that_it_waits() -> AsyncIterator[None]:
    """During the block, log every five seconds that the gateway waits: a silent broker raises nothing."""

    async def say() -> None:
        for number in count(1):
            await asyncio.sleep(_SAID_EVERY_S)
            LOG.warning("sessions=reading state=waiting for_s=%g; nothing is served yet", number * _SAID_EVERY_S)

    saying = asyncio.create_task(say())
    try:
        yield
    finally:
        saying.cancel()


class SessionLearner:
    """Learns sessions from the log; a session goes on only from tokens of this gateway's own policy."""

    def __init__(
        self,
        index: SessionIndex,
        answers: SampledAnswers,
        conversations: Conversations,
        owners: Owners,
        policy_id: str,
        *,
        by_key: bool = False,
    ) -> None:
        self._index = index
        self._answers = answers
        self._conversations = conversations
        self._owners = owners
        self._policy_id = policy_id
        self._by_key = by_key
        self.known: dict[str, WholeRequest] = {}
        self.num_unknown = 0  # exchanges whose parent is older than the window, or was left out
        self.inconsistent: dict[str, UnusableExchange] = {}  # exchanges that were left out, by id

    def learn(self, events: Iterable[Event]) -> None:
        """Fold the events in, in their order."""
        for event in events:
            self._owners.learn((event,))
            if isinstance(event, SessionDone):
                self._answers.forget(event.session_id)
            elif isinstance(event, ExchangeCompleted) and event.exchange_id not in self.known:
                self._learn_if_consistent(event)

    def _learn_if_consistent(self, event: ExchangeCompleted) -> None:
        parent = event.request.parent_exchange_id
        if parent is not None and parent not in self.known:
            self.num_unknown += 1
            return
        try:
            self._learn_exchange(event)
        except UnusableExchange as error:
            self.inconsistent.setdefault(event.exchange_id, error)

    def _learn_exchange(self, event: ExchangeCompleted) -> None:
        request = whole(replace(event.request, kept_tokens=0, token_ids=()), self.known)
        options = parse(request.options, "its options")
        messages = tuple(map(parse, request.messages))
        answer = parse(event.message)
        if role_of(answer) != "assistant":
            raise UnusableExchange(f"its answer's role is {role_of(answer)}, not assistant; it is skipped")
        self.known[event.exchange_id] = request
        scope = scope_of(options, asker_of(event.policy_id, event.key_name))
        self._index.asked(messages, scope, event.session_id, event.received_at_ms)
        self._index.answered(
            messages, answer, scope, event.session_id, event.exchange_id, event.finished_at_ms, event.trace_id
        )
        if is_ours(event.policy_id, self._policy_id, by_key=self._by_key):
            sampled = answered(reversed(messages), options, answer, event.output_ids)
            self._answers.answered(event.session_id, sampled, event.finished_at_ms)
        before = conversation_of(request.messages, options)
        if before is not None:
            self._conversations.answered(
                event.exchange_id,
                session_id=event.session_id,
                key_name=event.key_name,
                before=before,
                answer=event.message,
                at_ms=event.finished_at_ms,
            )


async def learn_owners(log: Log, owners: Owners, from_ms: int) -> None:
    """Read the log from where the owners' file ends until all owners are known; those since `from_ms` are already.

    Runs beside everything else, since it may read the whole log. While the log is away, this waits.
    """
    start: Start = "earliest" if owners.read_to_ms is None else owners.read_to_ms
    said, num_records, places = time.monotonic(), 0, dict[tuple[str, int], int]()
    while owners.read_to_ms is None or owners.read_to_ms < from_ms:
        try:
            async with closing(log.follow_raw((topics.EXCHANGES,), start, until_end=True)) as batches:
                async for raws in batches:
                    await owners.take(await asyncio.to_thread(_claims, raws))
                    places |= {(raw.topic, raw.partition): raw.offset + 1 for raw in raws}
                    num_records += len(raws)
                    if time.monotonic() - said > _SAID_EVERY_S:
                        LOG.warning("owners=reading records=%d; sessions not known yet get a 503", num_records)
                        said = time.monotonic()
            break
        except TryLater as error:
            LOG.warning("owners=unread state=waiting again_in_s=%g reason=%s", AGAIN_AFTER_S, error)
            start = places or start
            await asyncio.sleep(AGAIN_AFTER_S)
    owners.whole = True
    LOG.info("owners=whole records_read=%d", num_records)


def _claims(raws: Iterable[Raw]) -> list[SessionClaim]:
    records = (arrived(raw, codec(), digest=False) for raw in raws)
    claims = (claim_of(record.event) for record in records if isinstance(record, Record))
    return [claim for claim in claims if claim is not None]


async def follow_policy(log: Log, engines: Engines) -> None:
    """Tell `engines` of every version that is activated from now on; never returns."""

    async def follow() -> None:
        async with closing(log.follow((topics.POLICY,), start="latest")) as batches:
            async for records in batches:
                for event in _events(records, PolicyActivated):
                    engines.learn(event)

    waits, again_on = AGAIN_AFTER_S, (TryLater, OperatorError)
    await until_done(follow, "policy_topic=away", retry_s=waits, longest_s=waits, again_on=again_on)


def _events(records: Sequence[Arrived], kind: type[E]) -> list[E]:
    """Return the events of a kind; the stage that owns the topic puts unreadable records aside."""
    return [record.event for record in records if isinstance(record, Record) and isinstance(record.event, kind)]
