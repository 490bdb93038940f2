"""A request that asks for an answer: generate, show, record, and only then say how it ended.

The one rule: the client sees `finish_reason` after Kafka has acknowledged the exchange, never before. A client that
goes away cancels its generation; whatever else goes wrong is told to the client and recorded. Raw ASGI, because every
token passes here.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from time import perf_counter

from starlette.types import Receive, Scope, Send

from clawstream.errors import TryLater
from clawstream.events import FailureReason, SessionDone
from clawstream.gateway.admission import Admission, ClientGone, Exchange, Farewell, unavailable
from clawstream.gateway.capture import Capture, finish_reason
from clawstream.gateway.closing import closing
from clawstream.gateway.deltas import AnswerStream
from clawstream.gateway.dialects import Dialect
from clawstream.gateway.outlets import Outlet
from clawstream.gateway.refusal import BadRequest
from clawstream.gateway.replies import Usage
from clawstream.inference.engine import EngineRefused, FinishKind, GenerateRequest
from clawstream.inference.engine import Sampling as EngineSampling

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why there is no answer: for the log, and for the client if there is one."""

    reason: FailureReason | None  # None: Kafka did not take the answer, so there is nothing to write there
    detail: str
    refused: BadRequest
    status: int | None = None  # the engine's


_GONE = _Failure(
    reason=FailureReason.CLIENT_GONE,
    detail="the client closed its connection while the answer was being sampled",
    refused=BadRequest("The client went away.", status=499),
)


class Endpoint:
    """One route that answers, in its clients' dialect; one for all requests."""

    def __init__(self, admission: Admission, dialect: Dialect) -> None:
        self._admission = admission
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._admission.metrics
        started = perf_counter()
        try:
            admitted = await self._admission.admit(scope, receive, self._dialect.read)
        except ClientGone:
            return
        except BadRequest as refused:
            metrics.requests.labels("refused" if refused.status < 500 else "unavailable").inc()
            await self._dialect.refuse(send, refused)
            return
        if isinstance(admitted, Farewell):
            await self._end_session(admitted, send)
            return
        outlet = self._dialect.outlet(send, admitted)
        with metrics.in_flight.track_inprogress():
            outcome = await _Answering(
                admission=self._admission, exchange=admitted, outlet=outlet, started=started
            ).run(receive)
        metrics.requests.labels(outcome).inc()

    async def _end_session(self, farewell: Farewell, send: Send) -> None:
        newest = self._admission.sessions.newest_exchange(farewell.session_id)
        done = SessionDone(session_id=farewell.session_id, after_exchange_id=newest)
        try:
            await self._admission.recorder.append((done,))
        except TryLater as error:
            await self._dialect.refuse(send, unavailable(str(error)))
            return
        await self._dialect.farewell(send, farewell, self._admission.now_ms())


@dataclass(slots=True, kw_only=True)
class _Answering:
    """One exchange from its prompt to its record."""

    admission: Admission
    exchange: Exchange
    outlet: Outlet
    started: float  # perf_counter, when the request came
    capture: Capture = field(default_factory=Capture)
    answer: AnswerStream = field(init=False)

    def __post_init__(self) -> None:
        self.answer = AnswerStream(
            renderer=self.admission.renderer,
            prompt_ids=self.exchange.whole.token_ids,
            options=self.exchange.chat.options,
            exchange_id=self.exchange.accepted.exchange_id,
            stop=self.exchange.accepted.sampling.stop,
        )

    async def run(self, receive: Receive) -> str:
        """Answer; return how that ended, as a metrics label."""
        failure = await self._generate_while_wanted(receive) or await self._finish()
        if failure is None:
            return "completed"
        if failure is not _GONE:
            await self.outlet.fail(failure.refused)
        exchange_id = self.exchange.accepted.exchange_id
        if failure.reason is None:
            LOG.warning("exchange=%s state=unrecorded reason=%s", exchange_id, failure.detail)
            return "unrecorded"
        LOG.info("exchange=%s state=%s detail=%s", exchange_id, failure.reason.value, failure.detail)
        await self._record(failure, failure.reason)
        return failure.reason.value

    async def _generate_while_wanted(self, receive: Receive) -> _Failure | None:
        gone = False

        async def leave_when_gone() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            generating.cancel()

        async with asyncio.TaskGroup() as group:
            generating = group.create_task(self._generate())
            beside = (
                group.create_task(leave_when_gone()),
                group.create_task(self.outlet.keep_alive(self.admission.settings.heartbeat_s)),
            )
            generating.add_done_callback(lambda _: [task.cancel() for task in beside])
        return _GONE if gone and generating.cancelled() else generating.result()

    async def _generate(self) -> _Failure | None:
        """Stream the answer up to what has to wait for its record."""
        engine = self.exchange.engine
        try:
            async with (
                asyncio.timeout(self.admission.settings.first_token_timeout_s) as first_token,
                closing(engine.client.generate(self._request())) as chunks,
            ):
                async for chunk in chunks:
                    if chunk.token_ids and self.capture.first_token_at_ms is None:
                        first_token.reschedule(None)
                        self.admission.metrics.ttft_s.observe(perf_counter() - self.started)
                    self.capture.add(chunk, self.admission.now_ms())
                    delta = self.answer.feed(chunk.token_ids)
                    if delta is not None:
                        await self.outlet.delta(delta)
                    elif chunk.token_ids:
                        await self.outlet.begin()
        except EngineRefused as error:
            refused = BadRequest(f"The engine refused the request: {error.message}", status=error.status)
            return _Failure(
                reason=FailureReason.ENGINE_REFUSED, detail=error.message, refused=refused, status=error.status
            )
        except TryLater as error:
            return _engine_failed(str(error))
        except TimeoutError:
            detail = f"no token within {self.admission.settings.first_token_timeout_s:g} s"
            refused = unavailable(f"The engine gave {detail}. Try again.")
            return _Failure(reason=FailureReason.TIMED_OUT, detail=detail, refused=refused)
        finish = self.capture.finish
        if finish is None or finish.kind is FinishKind.ABORT:
            return _engine_failed((finish and finish.message) or "the engine gave the request up")
        return None

    async def _finish(self) -> _Failure | None:
        """Record the answer, then let the client see how it ended."""
        finish = self.capture.finish
        assert finish is not None  # _generate returns a failure otherwise
        delta = self.answer.finish(finish.matched if isinstance(finish.matched, str) else None)
        if delta is not None:
            await self.outlet.delta(delta)
        try:
            versions = self.capture.versions()
        except TryLater as error:
            return _engine_failed(str(error))
        accepted, message = self.exchange.accepted, self.answer.message()
        reason = finish_reason(finish, self.answer.tool_calls)
        now_ms = self.admission.now_ms()
        done = SessionDone(session_id=accepted.session_id, after_exchange_id=accepted.exchange_id)
        try:
            with self.admission.metrics.ack_wait_s.time():
                await self.admission.recorder.write(
                    accepted.session_id,
                    self.exchange.whole,
                    lambda request: self.capture.completed(accepted, request, message, reason, versions, now_ms),
                    then=(done,) if self.exchange.session_done else (),
                    traceparent=self.exchange.traceparent,
                )
        except TryLater as error:
            return _Failure(reason=None, detail=str(error), refused=unavailable(str(error)))
        chat = self.exchange.chat
        self.admission.sessions.answered(
            chat.messages, message, chat.scope, accepted.session_id, accepted.exchange_id, now_ms
        )
        await self.outlet.finish(message, reason, self._count_tokens())
        return None

    async def _record(self, failure: _Failure, reason: FailureReason) -> None:
        accepted, now_ms = self.exchange.accepted, self.admission.now_ms()
        try:
            await self.admission.recorder.write(
                accepted.session_id,
                self.exchange.whole,
                lambda request: self.capture.failed(
                    accepted, request, reason, failure.detail, now_ms, status=failure.status
                ),
                traceparent=self.exchange.traceparent,
            )
        except TryLater as error:
            LOG.warning("exchange=%s state=unrecorded reason=%s", accepted.exchange_id, error)

    def _request(self) -> GenerateRequest:
        asked = self.exchange.accepted.sampling
        return GenerateRequest(
            input_ids=self.exchange.whole.token_ids,
            sampling=EngineSampling(
                max_new_tokens=asked.max_tokens,
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=asked.top_k,
                stop_token_ids=self.admission.renderer.stop_token_ids,
                stop=asked.stop,
                sampling_seed=asked.seed,
            ),
            extra_key=f"{self.exchange.accepted.policy_id}:{self.exchange.policy_version}",
            rid=self.exchange.accepted.exchange_id,
        )

    def _count_tokens(self) -> Usage:
        usage = Usage(
            prompt_tokens=len(self.exchange.whole.token_ids),
            completion_tokens=len(self.capture.token_ids),
            cached_tokens=self.capture.cached_tokens,
        )
        self.admission.metrics.tokens.labels("prompt").inc(usage.prompt_tokens)
        self.admission.metrics.tokens.labels("completion").inc(usage.completion_tokens)
        return usage


def _engine_failed(detail: str) -> _Failure:
    refused = unavailable(f"The engine failed: {detail}. Try again.")
    return _Failure(reason=FailureReason.ENGINE_FAILED, detail=detail, refused=refused)
