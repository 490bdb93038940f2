"""From an HTTP request to an exchange that can be answered, or to a refusal, before anything is generated.

A request that is certain to fail (a key, a body, a model, a prompt too long, an engine known to be away,
Kafka away and its spool full) is refused here, with nothing started and nothing recorded.

The client decides how long a prompt takes, so large prompts have threads of their own and a time bound. A thread can't
be ended, so one that is given up runs to its end. While all threads are busy, other large prompts are told to try
again; streams and small prompts go on.
"""

import re
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

from starlette.types import Receive, Scope

from clawstream.config import GatewaySettings, PolicySettings
from clawstream.conversation.continuing import Continued, Request
from clawstream.conversation.history import WholeRequest
from clawstream.errors import TryLater, UnrenderableRequest
from clawstream.events import Sampling, TokenIds, TurnType, asker_of, policy_of_key
from clawstream.gateway.access.keys import Caller, named_agent
from clawstream.gateway.access.owners import Owners
from clawstream.gateway.answering.capture import Accepted
from clawstream.gateway.answering.prompts import PromptMaker
from clawstream.gateway.answering.replies import SampledTokens
from clawstream.gateway.engines import EngineAttempt, Engines
from clawstream.gateway.http.connection import Bounds
from clawstream.gateway.http.metrics import Metrics
from clawstream.gateway.outbox.delivery import Delivery
from clawstream.gateway.outbox.recorder import Recorder
from clawstream.gateway.picture_store import Seeing
from clawstream.gateway.requests.body import read_body, read_headers, too_large
from clawstream.gateway.requests.fields import BadRequest, TooLong, to_json
from clawstream.gateway.requests.pictures import ShownPicture, with_sealed_marks, with_true_marks
from clawstream.gateway.requests.profiles import RequestIdentity, name_request
from clawstream.gateway.requests.wire import ChatRequest, of_the_policy, parse_body, sampling_of, scope_of, truthy
from clawstream.gateway.sessions import (
    Conversations,
    KnownSession,
    Recall,
    RecalledResponse,
    SampledAnswers,
    SessionIndex,
)
from clawstream.rendering.renderer import PromptRenderer
from clawstream.stream.stage import now_ms

CALLER = "clawstream.caller"  # the scope's key for the `Caller`, which the guard sets
GROW = "clawstream.grow"  # and for the function that lets in more answers to the request
RETRY_AFTER_S = 2
MAX_RECORDED_BYTES = 8 * 2**20  # the most that a record of the log holds
_OWN_BYTES = 4096  # of a record, for its names, times and ids
_TOKEN_BYTES = 4
_MAX_TOKEN_BYTES = 64  # no text has so many bytes a token on average: 2 to 6 are usual
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

# Its arguments: the body, whether a header ends the session, and the look-up of an earlier answer.
Read = Callable[[Mapping[str, Any], bool, Recall], ChatRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """An exchange that is about to be answered."""

    accepted: Accepted
    chat: ChatRequest
    whole: WholeRequest
    policy_version: int  # the version that its engine was known to serve on arrival
    session_done: bool
    traceparent: str | None
    sampled: SampledTokens | None  # for the log-probs that the client asked for; None: it did not ask
    pictures: tuple[str, ...] = ()  # of the conversation, as data: URLs


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEndRequest:
    """A request that only ends its session."""

    session_id: str
    model: str


class _Session(NamedTuple):
    id: str
    client: str  # who named it; "new": nobody did, and it has no history


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request as it came: its content, its caller, and what it says of itself."""

    caller: Caller
    chat: ChatRequest
    named: RequestIdentity
    policy_id: str  # of the policy that is to answer
    traceparent: str | None
    received_at_ms: int
    shown: Sequence[ShownPicture]

    @property
    def asker(self) -> str | None:
        """Who asks, as far as that is known."""
        return asker_of(self.policy_id, self.caller.name)

    @property
    def trace_id(self) -> str | None:
        return None if self.traceparent is None else self.traceparent[3:35]

    @property
    def session(self) -> _Session | None:
        """The session that the client names; None: it names none."""
        named = self.named
        return None if named.session_id is None or named.client is None else _Session(named.session_id, named.client)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Admits requests or refuses them."""

    settings: GatewaySettings
    bounds: Bounds
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
    seeing: Seeing | None = None  # None: the policy reads text alone
    always_of_the_policy: bool = False  # override the client's sampling, so that every main answer can be trained on
    now_ms: Callable[[], int] = now_ms

    async def admit(self, scope: Scope, receive: Receive, read: Read) -> Exchange | SessionEndRequest:
        """Return what the request asks for, its body read by `read`. Raises BadRequest or ClientGone."""
        asked = await self._receive(scope, receive, read)
        chat = asked.chat
        if not chat.messages:
            return self._session_end(asked)
        _let_in_choices(asked, scope[GROW])
        session = self._session(asked)
        self._refuse_closed(session, asked.caller)
        attempt, context_length_tokens = self._attempt(session, asked.policy_id)
        prompt = await self._render(chat, session.id, context_length_tokens)
        _refuse_too_large(chat, prompt.token_ids)
        pictures = () if self.seeing is None else await self.seeing.shown(chat.messages, asked.shown, prompt.token_ids)
        accepted = self._accept(asked, session, prompt, context_length_tokens)
        self._refuse_another_key(session, asked.caller)  # another key may have begun the session during rendering
        self.sessions.asked(chat.messages, chat.scope, session.id, asked.received_at_ms)
        return Exchange(
            accepted=accepted,
            chat=chat,
            whole=WholeRequest(messages=chat.messages_json, token_ids=prompt.token_ids, options=chat.options_json),
            policy_version=attempt.version,
            session_done=asked.named.session_done,
            traceparent=asked.traceparent,
            sampled=None if chat.asked.top_logprobs is None else SampledTokens(self.renderer),
            pictures=pictures,
        )

    async def _receive(self, scope: Scope, receive: Receive, read: Read) -> _Asked:
        headers, caller = read_headers(scope), scope[CALLER]
        raw = await read_body(
            headers, receive, max_bytes=self.bounds.max_body_bytes, within_s=self.bounds.request_timeout_s
        )
        received_at_ms = self.now_ms()
        ends = truthy(headers.get("x-session-done"))
        chat, shown = await self._read(parse_body(raw), read, caller, ends_session=ends)
        traceparent, policy_id = headers.get("traceparent", ""), self._policy_of(chat, caller)
        return _Asked(
            caller=caller,
            chat=replace(chat, scope=scope_of(chat.options, asker_of(policy_id, caller.name))),
            named=name_request(headers, chat),
            policy_id=policy_id,
            traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else None,
            received_at_ms=received_at_ms,
            shown=shown,
        )

    async def _read(
        self, body: Mapping[str, Any], read: Read, caller: Caller, *, ends_session: bool
    ) -> tuple[ChatRequest, Sequence[ShownPicture]]:
        """Return what the body asks for, and the pictures that it shows. Raises BadRequest."""
        shown: Sequence[ShownPicture] = ()
        seal = secrets.token_hex(16)
        if self.seeing is not None:
            body, shown = await self.seeing.in_marks(body, seal)

        def recall(exchange_id: str) -> RecalledResponse | None:
            found = self.conversations.recall(exchange_id, caller.name)
            if found is None or self.seeing is None:
                return found
            return replace(found, before=with_sealed_marks(found.before, seal))

        self._refuse_too_many(body.get("messages"))
        self._refuse_too_many(body.get("input"))
        chat = read(body, ends_session, recall)
        chat = chat if self.seeing is None else with_true_marks(chat, seal)
        self._refuse_too_long(chat)
        self.check_model(chat.model)
        return chat, shown

    def _refuse_too_many(self, messages: object) -> None:
        """Raise BadRequest for more messages than the context has tokens, before any is looked at."""
        longest = self._longest_context()
        if longest is not None and isinstance(messages, list) and len(messages) > longest:
            raise TooLong(f"there are {len(messages)} messages", longest)

    def _refuse_too_long(self, chat: ChatRequest) -> None:
        """Raise BadRequest for a text that fits under no tokenizer, before tokenizing it takes minutes."""
        longest = self._longest_context()
        num_bytes = sum(map(len, chat.messages_json))
        if longest is None or num_bytes + len(chat.options_json) <= longest * _MAX_TOKEN_BYTES:
            return
        num_bytes += len(to_json(chat.options.get("tools")))
        if num_bytes > longest * _MAX_TOKEN_BYTES:
            raise TooLong(f"messages and tools are {num_bytes} bytes", longest)

    def _longest_context(self) -> int | None:
        """Return the longest context of any engine, in tokens; None while no engine has said it."""
        lengths = [engine.context_length_tokens for engine in self.engines.all]
        return max((tokens for tokens in lengths if tokens is not None), default=None)

    def check_model(self, asked: str | None) -> None:
        """Raise BadRequest where the client asks for a model that is not served."""
        served = self.policy.served_model
        if asked not in (None, served):
            raise BadRequest(
                f"The model {asked!r} does not exist; this gateway serves {served!r}.",
                status=404,
                code="model_not_found",
                param="model",
            )

    def _session_end(self, asked: _Asked) -> SessionEndRequest:
        session = asked.session
        if session is None:
            raise BadRequest("session_done without messages needs a session id: send X-Session-Id.", param="messages")
        self._refuse_closed(session, asked.caller)
        return SessionEndRequest(session_id=session.id, model=self.policy.served_model)

    def _session(self, asked: _Asked) -> _Session:
        session = asked.session or self._by_history(asked)
        self.metrics.sessions_named.labels(session.client).inc()
        return session

    def _by_history(self, asked: _Asked) -> _Session:
        """Return the session that the messages go on from, or a new one."""
        chat, retried = asked.chat, bool(asked.named.retry_count)
        found = self.sessions.find(chat.messages, chat.scope, retried=retried, trace_id=asked.trace_id)
        if found is not None:
            return _Session(found, "history")
        if any(message.get("role") == "assistant" for message in chat.messages):
            self.metrics.index_misses.inc()
        return _Session(str(uuid.uuid4()), "new")

    def _refuse_closed(self, session: _Session, caller: Caller) -> None:
        """Raise BadRequest where nothing of the session can be recorded now, or it is another key's."""
        problem = self.delivery.problem(session.id)
        if problem is not None:
            raise unavailable(f"{problem}; nothing was generated. Try again.")
        self._refuse_another_key(session, caller)

    def _refuse_another_key(self, session: _Session, caller: Caller) -> None:
        try:
            is_open = session.client == "new" or self.owners.is_open_to(session.id, caller.name)
        except TryLater as error:
            raise unavailable(f"{error}; nothing was generated. Try again.") from error
        if not is_open:
            raise BadRequest(
                f"The session {session.id} was begun with another key; nothing was generated. Use an id of your own.",
                status=403,
                code="session_of_another_key",
                param="session_id",
            )

    def _policy_of(self, chat: ChatRequest, caller: Caller) -> str:
        """Return the id of the policy that answers the caller. Raises BadRequest where it names it badly."""
        entry = self.policy.agent_entry
        if entry is not None:
            return policy_of_key(self.policy.id, named_agent(chat.metadata, entry, caller))
        return policy_of_key(self.policy.id, caller.name if self.policy.by_key else None)

    def _attempt(self, session: _Session, policy_id: str) -> tuple[EngineAttempt, int]:
        """Return the attempt at an engine for the session, and the engine's context in tokens."""
        attempt = self.engines.place(session.id, policy_id=policy_id)
        if attempt is None or attempt.engine.context_length_tokens is None:
            raise unavailable(f"The engine is away ({self.engines.problem()}); nothing was generated. Try again.")
        return attempt, attempt.engine.context_length_tokens

    async def _render(self, chat: ChatRequest, session_id: str, context_length_tokens: int) -> Continued:
        started, known = perf_counter(), self.answers.of(session_id, self.now_ms())
        prompt = await self._prompt(chat, known, context_length_tokens=context_length_tokens)
        self.metrics.rendering_s.labels(prompt.made.value).observe(perf_counter() - started)
        self.metrics.prompts.labels(prompt.made.value).inc()
        self.answers.asked(session_id, prompt, self.now_ms())
        return prompt

    async def _prompt(self, chat: ChatRequest, known: KnownSession, *, context_length_tokens: int | None) -> Continued:
        """Return the prompt. Raises BadRequest."""
        request = Request(messages=chat.messages, raw=chat.messages_json, options=chat.options)
        try:
            return await self.prompts.make(request, known, context_length_tokens=context_length_tokens)
        except UnrenderableRequest as error:
            raise BadRequest(f"The request can't be put to the policy: {error}.", param="messages") from error
        except TryLater as error:
            raise unavailable(f"{error}; nothing was generated. Try again.") from error

    def _accept(self, asked: _Asked, session: _Session, prompt: Continued, context_length_tokens: int) -> Accepted:
        named = asked.named
        # Where agents are named, nobody's groups have a prefix as well: without one they could have an agent's.
        asker = asked.asker if self.policy.agent_entry is None else asked.asker or ""
        return Accepted(
            exchange_id=str(uuid.uuid4()),
            session_id=session.id,
            turn_type=named.turn_type,
            client=session.client,
            key_name=asked.caller.name,
            model=self.policy.served_model,
            request_sha256=asked.chat.sha256,
            retry_count=named.retry_count,
            group=None if named.group is None else named.group.of_asker(asker),
            num_spliced=prompt.num_spliced,
            sampling=self._sampling(asked.chat, named.turn_type, prompt.token_ids, context_length_tokens),
            policy_id=asked.policy_id,
            trace_id=asked.trace_id,
            received_at_ms=asked.received_at_ms,
        )

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

    async def count_tokens(self, body: Mapping[str, Any], read: Read, caller: Caller) -> int:
        """Return how many tokens the body's prompt has, rendered whole; nothing is remembered. Raises BadRequest."""
        chat, _shown = await self._read(body, read, caller, ends_session=False)
        return len((await self._prompt(chat, KnownSession(), context_length_tokens=None)).token_ids)


def _let_in_choices(asked: _Asked, grow: Callable[[int], None]) -> None:
    """Count the answers after the first by `grow`. Raises BadRequest if they are too many, or belong to a group."""
    num_choices, group = asked.chat.asked.num_choices, asked.named.group
    if num_choices == 1:
        return
    if group is not None:
        raise BadRequest(
            f"n is {num_choices} beside X-Group-Id {group.group_id[:50]!r}: the choices of a request are a group of "
            "their own. Leave one of them out.",
            param="n",
        )
    grow(num_choices - 1)


def _refuse_too_large(chat: ChatRequest, prompt_ids: TokenIds) -> None:
    """Raise BadRequest for a request that is too large for a record of the log."""
    num_bytes = sum(map(len, chat.messages_json)) + len(chat.options_json) + _OWN_BYTES
    if num_bytes + _TOKEN_BYTES * len(prompt_ids) > MAX_RECORDED_BYTES:
        raise too_large(f"{num_bytes} bytes and {len(prompt_ids)} prompt tokens", MAX_RECORDED_BYTES)


def unavailable(message: str) -> BadRequest:
    """Return the refusal that asks the client to try later."""
    return BadRequest(message, status=503, code="service_unavailable", kind="server_error", retry_after_s=RETRY_AFTER_S)
