"""A request that asks for an answer, or for several (`n`), from its admission to its end.

Where one answer of a request fails, the others under way are given up and the request has failed; answers recorded by
then stay recorded. A client that goes away cancels its answers.
"""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from starlette.types import Receive, Scope, Send

from clawstream.errors import TryLater
from clawstream.events import SessionDone, asker_of
from clawstream.gateway.answering.admission import Admission, Exchange, SessionEndRequest, unavailable
from clawstream.gateway.answering.answer import GONE, ExchangeInProgress, Failure
from clawstream.gateway.dialects.kinds import Dialect
from clawstream.gateway.requests.body import ClientGone
from clawstream.gateway.requests.fields import BadRequest
from clawstream.gateway.requests.profiles import Grouped

_SEEDS = 2**64


def choices_of(exchange: Exchange) -> tuple[Exchange, ...]:
    """Return an exchange for each answer; the group of several is named by the first of them."""
    num, first = exchange.chat.asked.num_choices, exchange.accepted
    if num == 1:
        return (exchange,)
    asker = asker_of(first.policy_id, first.key_name)
    group = Grouped(group_id=first.exchange_id, size=num, step_index=None).of_asker(asker)
    return tuple(
        replace(
            exchange,
            accepted=replace(
                first,
                exchange_id=str(uuid.uuid4()) if index else first.exchange_id,
                sampling=replace(first.sampling, seed=_later_seed(first.sampling.seed, index)),
                group=group,
                choice_of=first.exchange_id,
            ),
            sampled=None if exchange.sampled is None else exchange.sampled.another(),
        )
        for index in range(num)
    )


def _later_seed(seed: int | None, index: int) -> int | None:
    """Return a later answer's seed, as an equal seed would repeat the first answer; 64 bits, with a sign."""
    return None if seed is None else (seed + index + _SEEDS // 2) % _SEEDS - _SEEDS // 2


class Endpoint:
    """One route that answers, in its clients' dialect; one object serves all its requests."""

    def __init__(self, admission: Admission, dialect: Dialect) -> None:
        self._admission = admission
        self._dialect = dialect
        self.refuse = dialect.refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._admission.metrics
        started = perf_counter()
        try:
            admitted = await self._admission.admit(scope, receive, self._dialect.read)
        except ClientGone:
            return
        except BadRequest as refused:
            metrics.requests.labels("refused" if refused.status < 500 else "unavailable").inc()
            await self.refuse(send, refused)
            return
        if isinstance(admitted, SessionEndRequest):
            await self._end_session(admitted, send)
            return
        exchanges = choices_of(admitted)
        outlets = self._dialect.outlets(send, exchanges)
        accepted = admitted.accepted
        holding = self._admission.owners.holding(accepted.session_id, accepted.key_name)
        with holding, metrics.in_flight.track_inprogress():
            answers = [
                ExchangeInProgress(admission=self._admission, exchange=exchange, outlet=outlet, started=started)
                for exchange, outlet in zip(exchanges, outlets, strict=True)
            ]
            outcome = await _AnswerGroup(answers, self._admission.bounds.heartbeat_s).run(receive)
        metrics.requests.labels(outcome).inc()

    async def _end_session(self, farewell: SessionEndRequest, send: Send) -> None:
        newest = self._admission.sessions.newest_exchange(farewell.session_id)
        done = SessionDone(session_id=farewell.session_id, after_exchange_id=newest)
        try:
            await self._admission.recorder.append((done,))
        except TryLater as error:
            await self.refuse(send, unavailable(str(error)))
            return
        self._admission.answers.forget(farewell.session_id)
        await self._dialect.farewell(send, farewell, self._admission.now_ms())


@dataclass(slots=True)
class _AnswerGroup:
    """All answers of one request."""

    answers: Sequence[ExchangeInProgress]
    heartbeat_s: float
    num_unfinished: int = 0
    failed_by: Failure | None = None  # the first that went wrong

    async def run(self, receive: Receive) -> str:
        """Answer the request; return the outcome as a metrics label."""
        self.num_unfinished = len(self.answers)
        failures = await self._answer(receive)
        if self.failed_by is None or not any(failures):
            return "completed"
        if self.failed_by is not GONE:
            await self.answers[0].outlet.fail(self.failed_by.refused)
        for answer, failure in zip(self.answers, failures, strict=True):
            if failure is not None:
                await answer.record(failure)
        return "unrecorded" if self.failed_by.reason is None else self.failed_by.reason.value

    async def _answer(self, receive: Receive) -> list[Failure | None]:
        """Return for each answer why there is none, None where there is one."""

        async def leave_when_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            give_up(GONE)

        def give_up(failure: Failure) -> None:
            self.failed_by = self.failed_by or failure
            for task in generating:
                task.cancel()

        async def end(answer: ExchangeInProgress, task: asyncio.Task[Failure | None]) -> Failure | None:
            await asyncio.wait((task,))
            failure = self._given_up() if task.cancelled() else task.result()
            if failure is None:
                self.num_unfinished -= 1
                failure = await answer.finish(is_last=not self.num_unfinished)
            if failure is not None:
                give_up(failure)
            return failure

        async with asyncio.TaskGroup() as group:
            generating = [group.create_task(answer.generate()) for answer in self.answers]
            beside = (
                group.create_task(leave_when_gone()),
                group.create_task(self.answers[0].outlet.keep_alive(self.heartbeat_s)),
            )
            ends = [group.create_task(end(answer, task)) for answer, task in zip(self.answers, generating, strict=True)]
            await asyncio.wait(generating)
            for task in beside:
                task.cancel()
        return [task.result() for task in ends]

    def _given_up(self) -> Failure:
        """Return why an answer was given up: its client left, or another answer failed."""
        assert self.failed_by is not None, "nothing else cancels"
        if self.failed_by is GONE:
            return GONE
        return replace(self.failed_by, detail=f"another answer to the request failed: {self.failed_by.detail}")
