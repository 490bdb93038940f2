"""One answer: generate, show, record, and only then say how it ended.

The client sees `finish_reason` only after Kafka has acknowledged the exchange, or the spool's disk has it. A request
that fails before its first token is tried again: at the same engine if cache or adapter were not as assumed, at another
one if the engine is lost. After the last try, and for any other failure, the client is told, and the failure is
recorded where possible.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter
from typing import Any

from clawstream.conversation.continuing import answered
from clawstream.errors import TryLater
from clawstream.events import FailureReason, SessionDone
from clawstream.gateway.answering.admission import Admission, Exchange, unavailable
from clawstream.gateway.answering.capture import Capture
from clawstream.gateway.answering.deltas import AnswerStream
from clawstream.gateway.answering.outlets import Outlet, closing
from clawstream.gateway.answering.replies import Ending, Usage
from clawstream.gateway.dialects.responses import conversation_of
from clawstream.gateway.engines import EngineAttempt, ServedEngine, StaleCache
from clawstream.gateway.requests.fields import BadRequest, to_json
from clawstream.inference.engine import (
    EngineRefused,
    FinishKind,
    GenerateRequest,
    as_recorded,
    finish_reason,
    policy_version,
)

LOG = logging.getLogger(__name__)
_SHARED_KEYS = 3  # tries under a shared cache key; each later one has a key of its own


class _Again(StrEnum):
    """Where a request that failed before its first token may be tried again."""

    NOWHERE = "nowhere"
    HERE = "here"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why there is no answer: for the log, and for the client if it is still there."""

    reason: FailureReason | None  # None: neither Kafka nor the spool took the answer, so no failure can be written
    detail: str
    refused: BadRequest
    status: int | None = None  # the engine's
    again: _Again = _Again.NOWHERE


GONE = Failure(
    reason=FailureReason.CLIENT_GONE,
    detail="the client closed its connection while the answer was being sampled",
    refused=BadRequest("The client went away.", status=499),
)


@dataclass(slots=True, kw_only=True, eq=False)
class ExchangeInProgress:
    """One exchange from its prompt to its record."""

    admission: Admission
    exchange: Exchange
    outlet: Outlet
    started: float  # perf_counter, when the request's headers had come
    capture: Capture = field(default_factory=Capture)
    attempt: EngineAttempt | None = None  # the last attempt
    answer: AnswerStream = field(init=False)
    adapter_version: int | None = None  # of the adapter that is asked; None: the weights themselves

    def __post_init__(self) -> None:
        self.answer = AnswerStream(
            renderer=self.admission.renderer,
            prompt_ids=self.exchange.whole.token_ids,
            options=self.exchange.chat.options,
            exchange_id=self.exchange.accepted.exchange_id,
            stop=self.exchange.accepted.sampling.stop,
        )
        if self.exchange.sampled is not None:
            self.answer.content_numbers = self.exchange.sampled.content_numbers

    async def generate(self) -> Failure | None:
        """Stream the answer of the first engine that begins one; its end is sent by `finish`, after the record."""
        engines, accepted = self.admission.engines, self.exchange.accepted
        tenant = None if self.admission.settings.share_prefix_cache else accepted.key_name
        deadline = asyncio.get_running_loop().time() + self.admission.bounds.first_token_timeout_s
        failure: Failure | None = None
        failed: list[ServedEngine] = []
        for tries in range(_SHARED_KEYS + 1 + len(engines.all)):
            alone = tries >= _SHARED_KEYS
            attempt = engines.place(
                accepted.session_id, policy_id=accepted.policy_id, tenant=tenant, avoid=failed, alone=alone
            )
            if attempt is None:
                break
            if failure is not None:
                self.admission.metrics.asked_again.labels(failure.again.value).inc()
                LOG.info("exchange=%s asked_again=%s why=%s", accepted.exchange_id, failure.again, failure.detail)
            # SGLang aborts every request whose rid begins with the aborted one. No try's rid begins with another's.
            rid = f"{tries}-{accepted.exchange_id}" if tries else accepted.exchange_id
            failure = await self._ask(attempt, rid, deadline)
            if failure is None or failure.again is _Again.NOWHERE or self.capture.token_ids:
                return failure
            if failure.again is _Again.ELSEWHERE:
                failed.append(attempt.engine)
        return failure or _engine_failed(f"no engine answers ({engines.problem()})")

    async def _ask(self, attempt: EngineAttempt, rid: str, deadline: float) -> Failure | None:
        """Ask one engine, and stream its tokens from the first one on."""
        self.capture, self.attempt, self.adapter_version = Capture(), attempt, attempt.adapter_version
        try:
            async with asyncio.timeout_at(deadline) as time_limit:
                with self.admission.engines.asked(self.exchange.accepted.session_id, attempt, time_limit):
                    await self._stream(attempt, rid, time_limit)
        except EngineRefused as error:
            return await self._refused(attempt, error)
        except StaleCache as error:
            return _engine_failed(str(error), _Again.HERE)
        except TryLater as error:
            attempt.engine.doubted.set()
            return _engine_failed(str(error), _Again.ELSEWHERE)
        except TimeoutError:
            if attempt.engine.problem is not None:
                return _engine_failed(attempt.engine.problem, _Again.ELSEWHERE)
            detail = f"no token within {self.admission.bounds.first_token_timeout_s:g} s"
            refused = unavailable(f"The engine gave {detail}. Try again.")
            return Failure(reason=FailureReason.TIMED_OUT, detail=detail, refused=refused)
        finish = self.capture.finish
        if finish is None or finish.kind is FinishKind.ABORT:
            return _engine_failed((finish and finish.message) or "the engine gave the request up", _Again.ELSEWHERE)
        return None

    async def _stream(self, attempt: EngineAttempt, rid: str, time_limit: asyncio.Timeout) -> None:
        async with closing(attempt.engine.client.generate(self._request(attempt, rid))) as chunks:
            async for chunk in chunks:
                if chunk.token_ids and self.capture.first_token_at_ms is None:
                    attempt.check(chunk)
                    self.admission.metrics.ttft_s.observe(perf_counter() - self.started)
                if chunk.token_ids and time_limit.when() is not None:
                    time_limit.reschedule(None)
                self.capture.add(chunk, self.admission.now_ms())
                if self.exchange.sampled is not None:
                    self.exchange.sampled.add(chunk)
                delta = self.answer.feed(chunk.token_ids)
                if delta is not None:
                    await self.outlet.delta(delta)
                elif chunk.token_ids:
                    await self.outlet.begin()
                self.capture.num_sent_tokens = self.answer.num_sent_tokens or self.capture.num_sent_tokens

    async def _refused(self, attempt: EngineAttempt, error: EngineRefused) -> Failure:
        """Return the failure for a refusal; where the adapter is gone, it allows another try."""
        if attempt.adapter is not None:
            await attempt.engine.ask()
            if not attempt.engine.has(attempt.adapter):
                return _engine_failed(f"{attempt.adapter} is not loaded any more", _Again.HERE)
        refused = BadRequest(f"The engine refused the request: {error.message}", status=error.status)
        return Failure(reason=FailureReason.ENGINE_REFUSED, detail=error.message, refused=refused, status=error.status)

    async def finish(self, *, is_last: bool) -> Failure | None:
        """Record the answer, then let the client see how it ended; `is_last`: it is the request's last answer."""
        finish = self.capture.finish
        assert finish is not None  # generate returns a failure otherwise
        matched_stop = finish.matched if isinstance(finish.matched, str) else None
        delta = self.answer.finish(matched_stop)
        if delta is not None:
            await self.outlet.delta(delta)
        try:
            behaviour = self.capture.behaviour(self.adapter_version)
        except TryLater as error:
            return _engine_failed(str(error))
        accepted, message = self.exchange.accepted, self.answer.message()
        reason = finish_reason(finish, self.answer.tool_calls)
        now_ms = self.admission.now_ms()
        done = SessionDone(session_id=accepted.session_id, after_exchange_id=accepted.exchange_id)
        try:
            with self.admission.metrics.ack_wait_s.time():
                recorded = await self.admission.recorder.write(
                    accepted.session_id,
                    self.exchange.whole,
                    lambda request: self.capture.completed(accepted, request, message, reason, behaviour, now_ms),
                    then=(done,) if self.exchange.session_done and is_last else (),
                    traceparent=self.exchange.traceparent,
                )
        except TryLater as error:
            return Failure(reason=None, detail=str(error), refused=unavailable(str(error)))
        self.admission.owners.learn((recorded,))
        chat = self.exchange.chat
        self.admission.sessions.answered(
            chat.messages, message, chat.scope, accepted.session_id, accepted.exchange_id, now_ms, accepted.trace_id
        )
        before = conversation_of(chat.messages_json, chat.options)
        if before is not None:
            self.admission.conversations.answered(
                accepted.exchange_id,
                session_id=accepted.session_id,
                key_name=accepted.key_name,
                before=before,
                answer=to_json(message),
                at_ms=now_ms,
            )
        if self.exchange.session_done:
            self.admission.answers.forget(accepted.session_id)
        else:
            sampled = answered(reversed(chat.messages), chat.options, message, tuple(self.capture.token_ids))
            self.admission.answers.answered(accepted.session_id, sampled, now_ms)
        usage = self._count_tokens()
        await self.outlet.finish(Ending(message=message, reason=reason, usage=usage, matched_stop=matched_stop))
        return None

    async def record(self, failure: Failure) -> None:
        """Record that there is no answer, if the log or the spool can be written."""
        accepted, reason, now_ms = self.exchange.accepted, failure.reason, self.admission.now_ms()
        if reason is None:
            LOG.warning("exchange=%s state=unrecorded reason=%s", accepted.exchange_id, failure.detail)
            return
        LOG.info("exchange=%s state=%s detail=%s", accepted.exchange_id, reason.value, failure.detail)
        try:
            recorded = await self.admission.recorder.write(
                accepted.session_id,
                self.exchange.whole,
                lambda request: self.capture.failed(
                    accepted,
                    request,
                    reason,
                    failure.detail,
                    now_ms,
                    status=failure.status,
                    message=self._shown() if reason is FailureReason.CLIENT_GONE else None,
                    version=self._version(),
                ),
                traceparent=self.exchange.traceparent,
            )
        except TryLater as error:
            LOG.warning("exchange=%s state=unrecorded reason=%s", accepted.exchange_id, error)
        else:
            self.admission.owners.learn((recorded,))

    def _shown(self) -> dict[str, Any] | None:
        """The part of the answer that a client was sent before it went away; None: nothing, or it did not stream.

        None also for one of several answers, since a later reaction could not be assigned to one of them.
        """
        if self.exchange.accepted.choice_of is not None:
            return None
        message = self.answer.message()
        said = message["content"] or message.get("tool_calls")
        return message if said and self.exchange.chat.asked.stream else None

    def _version(self) -> int | None:
        """The version that sampled all tokens so far; None where only the engine's last chunk could tell.

        It is known where all chunks name the attempt's weights: a chunk's tokens were sampled by the weights that it
        names or by older ones, and none by older ones than the attempt's.
        """
        named = self.capture.named
        if self.attempt is None or None in named or {policy_version(name) for name in named} != {self.attempt.weights}:
            return None
        return self.attempt.version

    def _request(self, attempt: EngineAttempt, rid: str) -> GenerateRequest:
        stop_ids = self.admission.renderer.stop_ids(self.exchange.chat.options)
        return GenerateRequest(
            input_ids=self.exchange.whole.token_ids,
            sampling=as_recorded(self.exchange.accepted.sampling, stop_ids),
            extra_key=attempt.extra_key,
            rid=rid,
            lora_name=attempt.adapter,
            top_logprobs_num=self.exchange.chat.asked.top_logprobs or 0,
            pictures=self.exchange.pictures,
            picture_id=self.admission.renderer.picture_id,
        )

    def _count_tokens(self) -> Usage:
        usage = Usage(
            prompt_tokens=len(self.exchange.whole.token_ids),
            completion_tokens=len(self.capture.token_ids),
            cached_tokens=self.capture.cached_tokens,
            reasoning_tokens=self.answer.num_thought_tokens(),
        )
        self.admission.metrics.tokens.labels("prompt").inc(usage.prompt_tokens)
        self.admission.metrics.tokens.labels("completion").inc(usage.completion_tokens)
        return usage


def _engine_failed(detail: str, again: _Again = _Again.NOWHERE) -> Failure:
    refused = unavailable(f"The engine failed: {detail}. Try again.")
    return Failure(reason=FailureReason.ENGINE_FAILED, detail=detail, refused=refused, again=again)
