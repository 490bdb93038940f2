"""From an HTTP request to an exchange that can be answered, or to a refusal, before anything is generated.

The one rule: what is certain to fail (a key, a body, a model, a prompt too long, an engine known to be away, Kafka away
and its spool full) is refused here, with nothing started and nothing recorded.
"""

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from starlette.types import Message, Receive, Scope

from clawstream.config import GatewaySettings, PolicySettings
from clawstream.conversation.continuing import Continued, Request
from clawstream.conversation.history import WholeRequest
from clawstream.errors import ClawstreamError, TryLater, UnrenderableRequest
from clawstream.events import Sampling, TokenIds, TurnType
from clawstream.gateway.access.keys import Caller
from clawstream.gateway.access.owners import Owners
from clawstream.gateway.answering.capture import Accepted
from clawstream.gateway.answering.sampled import SampledTokens
from clawstream.gateway.engines.pool import Engines
from clawstream.gateway.http.metrics import Metrics
from clawstream.gateway.outbox.delivery import Delivery
from clawstream.gateway.outbox.recorder import Recorder
from clawstream.gateway.requests.grouped import refuse_beside_choices
from clawstream.gateway.requests.profiles import Named, name_request
from clawstream.gateway.requests.refusal import BadRequest, TooLong, to_json
from clawstream.gateway.requests.sampling import of_the_policy, sampling_of
from clawstream.gateway.requests.wire import ChatRequest, parse_body, scope_of, truthy
from clawstream.gateway.sessions.conversations import Conversations, Recall
from clawstream.gateway.sessions.matching import SessionIndex
from clawstream.gateway.sessions.prompting import PromptMaker
from clawstream.gateway.sessions.sampled_answers import Known, SampledAnswers
from clawstream.rendering.renderer import PromptRenderer

CALLER = "clawstream.caller"  # where in the scope the guard says who asks
GROW = "clawstream.grow"  # and what lets in so many more answers to the request
RETRY_AFTER_S = 2
MAX_RECORDED_BYTES = 8 * 2**20  # what a record of the log holds
_OWN_BYTES = 4096  # of a record, for its names, times and ids
_TOKEN_BYTES = 4
_MAX_TOKEN_BYTES = 64  # on average; a text has 2 to 6 bytes a token
_DISCARDED_BYTES = 64 * 2**20
_DISCARDED_S = 10.0
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


# A body, whether a header ends the session, and what finds an earlier answer.
Read = Callable[[Mapping[str, Any], bool, Recall], ChatRequest]


class ClientGone(ClawstreamError):
    """The client closed its connection before its request was whole; there is nobody to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """An exchange that is about to be answered."""

    accepted: Accepted
    chat: ChatRequest
    whole: WholeRequest
    policy_version: int  # that its engine was known to serve when it came
    session_done: bool
    traceparent: str | None
    sampled: SampledTokens | None  # whose log-probs the client asked for; None: it did not


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """A request that asks for nothing but the end of its session."""

    session_id: str
    model: str


def epoch_ms() -> int:
    """Return the time in ms since the epoch, UTC."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Who and what is let in."""

    settings: GatewaySettings
    policy: PolicySettings
    renderer: PromptRenderer
    prompts: PromptMaker
    engines: Engines
    recorder: Recorder
    delivery: Delivery
    sessions: SessionIndex
    owners: Owners
    answers: SampledAnswers
    conversations: Conversations
    metrics: Metrics
    always_of_the_policy: bool = False  # whatever the client asks, so that every main answer can be trained on
    now_ms: Callable[[], int] = epoch_ms

    async def admit(self, scope: Scope, receive: Receive, read: Read) -> Exchange | Farewell:
        """Return what the request asks for, its body read by `read`. Raises BadRequest or ClientGone."""
        headers = read_headers(scope)
        caller: Caller = scope[CALLER]
        raw = await read_body(
            headers, receive, max_bytes=self.settings.max_body_bytes, within_s=self.settings.request_timeout_s
        )
        received_at_ms = self.now_ms()
        ends_session = truthy(headers.get("x-session-done"))
        chat, model = self._read(parse_body(raw), read, caller, ends_session=ends_session)
        named = name_request(headers, chat, TurnType(self.settings.default_turn_type))
        if not chat.messages:
            if named.session_id is None:
                raise BadRequest(
                    "session_done without messages needs a session id: send X-Session-Id.", param="messages"
                )
            self._refuse_unrecordable(named.session_id)
            self._refuse_another_key(named.session_id, caller.name)
            return Farewell(session_id=named.session_id, model=model)
        if chat.asked.num_choices > 1:
            refuse_beside_choices(named.group, chat.asked.num_choices)
            scope[GROW](chat.asked.num_choices - 1)
        chat = replace(chat, scope=scope_of(chat.options, caller.name))
        trace = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
        trace_id = trace.group(1) if trace else None
        session_id, client = self._session(named, chat, trace_id)
        self._refuse_unrecordable(session_id)
        if client != "new":
            self._refuse_another_key(session_id, caller.name)
        place = self.engines.place(session_id)
        if place is None or place.engine.context_length_tokens is None:
            raise unavailable(f"The engine is away ({self.engines.problem()}); nothing was generated. Try again.")
        prompt = await self._render(chat, session_id, place.engine.context_length_tokens)
        prompt_ids = prompt.token_ids
        num_bytes = sum(map(len, chat.messages_json)) + len(chat.options_json) + _OWN_BYTES
        if num_bytes + _TOKEN_BYTES * len(prompt_ids) > MAX_RECORDED_BYTES:
            raise _too_large(f"{num_bytes} bytes and {len(prompt_ids)} prompt tokens", MAX_RECORDED_BYTES)
        accepted = Accepted(
            exchange_id=str(uuid.uuid4()),
            session_id=session_id,
            turn_type=named.turn_type,
            client=client,
            key_name=caller.name,
            model=model,
            request_sha256=chat.sha256,
            retry_count=named.retry_count,
            group=None if named.group is None else named.group.of_key(caller.name),
            num_spliced=prompt.num_spliced,
            sampling=self._sampling(chat, named.turn_type, prompt_ids, place.engine.context_length_tokens),
            policy_id=self.policy.id,
            trace_id=trace_id,
            received_at_ms=received_at_ms,
        )
        if client != "new":  # another key may have begun it while this was rendered
            self._refuse_another_key(session_id, caller.name)
        self.sessions.asked(chat.messages, chat.scope, session_id, received_at_ms)
        return Exchange(
            accepted=accepted,
            chat=chat,
            whole=WholeRequest(messages=chat.messages_json, token_ids=prompt_ids, options=chat.options_json),
            policy_version=place.version,
            session_done=named.session_done,
            traceparent=trace.group(0) if trace else None,
            sampled=None if chat.asked.top_logprobs is None else SampledTokens(self.renderer),
        )

    async def count_tokens(self, body: Mapping[str, Any], read: Read, caller: Caller) -> int:
        """Return how many tokens the body's prompt has, rendered anew; nothing is remembered. Raises BadRequest."""
        chat, _ = self._read(body, read, caller, ends_session=False)
        return len((await self._prompt(chat, Known(), context_length_tokens=None)).token_ids)

    def _read(
        self, body: Mapping[str, Any], read: Read, caller: Caller, *, ends_session: bool
    ) -> tuple[ChatRequest, str]:
        """Return what the body asks for, and the model that answers. Raises BadRequest."""
        self._refuse_too_many(body.get("messages"))
        self._refuse_too_many(body.get("input"))
        chat = read(body, ends_session, lambda exchange_id: self.conversations.recall(exchange_id, caller.name))
        self._refuse_too_long(chat)
        return chat, self._served_model(chat.model)

    def _served_model(self, asked: str | None) -> str:
        served = self.policy.served_model
        if asked not in (None, served):
            raise BadRequest(
                f"The model {asked!r} does not exist; this gateway serves {served!r}.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return served

    def _session(self, named: Named, chat: ChatRequest, trace_id: str | None) -> tuple[str, str]:
        """Return the session's id and who named it."""
        session_id, client = named.session_id, named.client
        if session_id is None or client is None:
            retried = bool(named.retry_count)
            session_id = self.sessions.find(chat.messages, chat.scope, retried=retried, trace_id=trace_id)
            client = "history"
            if session_id is None:
                if any(message.get("role") == "assistant" for message in chat.messages):
                    self.metrics.index_misses.inc()
                session_id, client = str(uuid.uuid4()), "new"
        self.metrics.sessions_named.labels(client).inc()
        return session_id, client

    def _longest_context(self) -> int | None:
        """Return the context of the engine that has most, in tokens; None while no engine has told."""
        told = [engine.context_length_tokens for engine in self.engines.all]
        return max((tokens for tokens in told if tokens is not None), default=None)

    def _refuse_too_many(self, messages: object) -> None:
        """Raise BadRequest for more messages than the context has tokens, before any is looked at."""
        longest = self._longest_context()
        if longest is not None and isinstance(messages, list) and len(messages) > longest:
            raise TooLong(f"there are {len(messages)} messages", longest)

    def _refuse_too_long(self, chat: ChatRequest) -> None:
        """Raise BadRequest for what no tokenizer would make fit, before one takes minutes to say so."""
        longest = self._longest_context()
        num_bytes = sum(map(len, chat.messages_json))
        if longest is None or num_bytes + len(chat.options_json) <= longest * _MAX_TOKEN_BYTES:
            return
        num_bytes += len(to_json(chat.options.get("tools")))
        if num_bytes > longest * _MAX_TOKEN_BYTES:
            raise TooLong(f"messages and tools are {num_bytes} bytes", longest)

    def _refuse_unrecordable(self, session_id: str) -> None:
        problem = self.delivery.problem(session_id)
        if problem is not None:
            raise unavailable(f"{problem}; nothing was generated. Try again.")

    def _refuse_another_key(self, session_id: str, key_name: str | None) -> None:
        try:
            is_open = self.owners.is_open_to(session_id, key_name)
        except TryLater as error:
            raise unavailable(f"{error}; nothing was generated. Try again.") from error
        if not is_open:
            raise BadRequest(
                f"The session {session_id} was begun with another key; nothing was generated. Use an id of your own.",
                status=403,
                code="session_of_another_key",
                param="session_id",
            )

    async def _render(self, chat: ChatRequest, session_id: str, context_length_tokens: int) -> Continued:
        started, known = perf_counter(), self.answers.of(session_id, self.now_ms())
        prompt = await self._prompt(chat, known, context_length_tokens=context_length_tokens)
        self.metrics.rendering_s.labels(prompt.made.value).observe(perf_counter() - started)
        self.metrics.prompts.labels(prompt.made.value).inc()
        self.answers.asked(session_id, prompt, self.now_ms())
        return prompt

    def _sampling(
        self, chat: ChatRequest, turn_type: TurnType, prompt_ids: TokenIds, context_length_tokens: int
    ) -> Sampling:
        try:
            self.renderer.stop_ids(chat.options)
            grammar = self.renderer.grammar(chat.options, prompt_ids)
        except UnrenderableRequest as error:
            raise BadRequest(f"The request can't be put to the policy: {error}.", param="tool_choice") from error
        sampling = sampling_of(
            chat.asked,
            grammar=grammar,
            num_prompt_tokens=len(prompt_ids),
            context_length_tokens=context_length_tokens,
            default_max_tokens=self.settings.default_max_tokens,
            default_temperature=self.settings.default_temperature,
        )
        if self.always_of_the_policy and turn_type is TurnType.MAIN:
            return of_the_policy(sampling, default_temperature=self.settings.default_temperature)
        return sampling

    async def _prompt(self, chat: ChatRequest, known: Known, *, context_length_tokens: int | None) -> Continued:
        """Return the prompt. Raises BadRequest."""
        request = Request(messages=chat.messages, raw=chat.messages_json, options=chat.options)
        try:
            return await self.prompts.make(request, known, context_length_tokens=context_length_tokens)
        except UnrenderableRequest as error:
            raise BadRequest(f"The request can't be put to the policy: {error}.", param="messages") from error
        except TryLater as error:
            raise unavailable(f"{error}; nothing was generated. Try again.") from error


def unavailable(message: str) -> BadRequest:
    """Return the refusal that says: later."""
    return BadRequest(message, status=503, code="service_unavailable", kind="server_error", retry_after_s=RETRY_AFTER_S)


def read_headers(scope: Scope) -> dict[str, str]:
    """Return the headers by lower-case name; of repeated ones, the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(headers: Mapping[str, str], receive: Receive, *, max_bytes: int, within_s: float) -> bytes:
    """Return the whole body; of one that is too large no more than `max_bytes` are ever held. Raises BadRequest."""
    try:
        async with asyncio.timeout(within_s):
            return await _read_body(headers, receive, max_bytes)
    except TimeoutError as error:
        message = f"The body did not come within {within_s:g} s (gateway.request_timeout_s). Send it faster."
        raise BadRequest(message, status=408, code="request_timeout") from error


async def _read_body(headers: Mapping[str, str], receive: Receive, max_bytes: int) -> bytes:
    coding = headers.get("content-encoding", "identity")
    if coding != "identity":
        raise BadRequest(f"The body is compressed ({coding[:20]}); send it as it is.", status=415)
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        if "expect" not in headers:  # a client that asks first sends nothing once it is refused
            await _discard(receive)
        raise _too_large(f"{int(declared)} bytes", max_bytes)
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await _next(receive)
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > max_bytes:
            pieces.clear()
            await _discard(receive)
            raise _too_large(f"more than {max_bytes} bytes", max_bytes)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def _discard(receive: Receive) -> None:
    """Let the rest of a body pass by, within limits: a client that is still writing would not see the refusal."""
    left = _DISCARDED_BYTES
    try:
        async with asyncio.timeout(_DISCARDED_S):
            while left > 0:
                message = await _next(receive)
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


async def _next(receive: Receive) -> Message:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone("the client went away while it sent its request")
    return message


def _too_large(found: str, max_bytes: int) -> BadRequest:
    return BadRequest(
        f"The body is {found}; at most {max_bytes} bytes can be recorded. Shorten the conversation.",
        status=413,
        code="request_too_large",
    )
