"""Sessions as a gateway writes them: what tests of pairing, judging and samples feed the stages with.

Every value follows from the arguments: the same calls give the same events.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clawstream.conversation.continuing import Renderer, Request, ShownAnswer, answered, continue_prompt, find_echoes
from clawstream.conversation.history import Parent, WholeRequest, shorten, whole
from clawstream.events import (
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    FailureReason,
    FeedbackGiven,
    FeedbackSource,
    FinishReason,
    RequestDelta,
    Sampling,
    SessionDone,
    TurnType,
    VersionSpan,
    derived_id,
)
from clawstream.stream.stage import Record
from clawstream.stream.topics import ANSWERS as ANSWERS
from clawstream.stream.topics import EXCHANGES
from clawstream.stream.topics import SAMPLES as SAMPLES

Json = dict[str, Any]

SECOND_MS = 1000


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str) -> Json:
    return {"role": "assistant", "content": text}


def raw(messages: Iterable[Mapping[str, Any]]) -> tuple[bytes, ...]:
    return tuple(json.dumps(message).encode() for message in messages)


def tokens(text: bytes) -> tuple[int, ...]:
    return tuple(text)


_SAMPLING = Sampling(temperature=0.7, top_p=1.0, top_k=None, max_tokens=64, seed=None, stop=())


class Letters:
    """A template that writes a prompt as its messages, byte for byte, and goes on from any answer but an empty one."""

    bridges = True

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        return tokens(json.dumps([list(messages), dict(options)]).encode())

    def bridge_ids(
        self,
        prompt_ids: Sequence[int],  # noqa: ARG002
        answer: Mapping[str, Any],  # noqa: ARG002
        output_ids: tuple[int, ...],
        between: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> tuple[int, ...] | None:
        return (*output_ids, *self.prompt_ids(between, options)) if output_ids else None

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


@dataclass
class Session:
    """One session at a gateway: each call is an exchange, a second after the one before."""

    session_id: str = "s"
    policy_version: int = 3
    num: int = 0
    num_rated: int = 0
    written: list[Event] = field(default_factory=list)
    _parent: Parent | None = None
    answers: list[ShownAnswer] = field(default_factory=list)  # that the gateway knows
    splices: bool = True
    renderer: Renderer = field(default_factory=Letters)
    sampled: Callable[[str], tuple[int, ...]] = lambda text: tokens(text.encode())
    group_id: str | None = None
    group_size: int | None = None

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: Mapping[str, Any] | str,
        *,
        turn_type: TurnType = TurnType.MAIN,
        finish_reason: FinishReason = FinishReason.STOP,
        logprobs: Sequence[float | None] | None = None,
        took_ms: int = 500,
        options: bytes = b'{"model":"policy"}',
        step_index: int | None = None,
    ) -> ExchangeCompleted:
        message = assistant(answer) if isinstance(answer, str) else dict(answer)
        exchange_id, delta, received_at_ms, num_spliced = self._next(messages, options)
        output_ids = self.sampled(str(message.get("content") or ""))
        exchange = ExchangeCompleted(
            session_id=self.session_id,
            exchange_id=exchange_id,
            turn_type=turn_type,
            client="headers",
            key_name=None,
            model="policy",
            request=delta,
            request_sha256=hashlib.sha256(b"".join(raw(messages)) + options).hexdigest(),
            retry_count=None,
            sampling=_SAMPLING,
            policy_id="policy",
            versions=(VersionSpan(policy_version=self.policy_version, num_tokens=len(output_ids)),),
            message=json.dumps(message).encode(),
            output_ids=output_ids,
            output_logprobs=(-0.5,) * len(output_ids) if logprobs is None else tuple(logprobs),
            finish_reason=finish_reason,
            cached_tokens=None,
            num_spliced=num_spliced,
            trace_id=None,
            received_at_ms=received_at_ms,
            first_token_at_ms=received_at_ms + 10,
            finished_at_ms=received_at_ms + took_ms,
            group_id=self.group_id,
            group_size=self.group_size,
            step_index=step_index,
        )
        self.written.append(exchange)
        self.answers.append(answered(reversed(messages), json.loads(options), message, output_ids))
        return exchange

    def choose(self, messages: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> list[ExchangeCompleted]:
        """One request with several answers, which are a group."""
        asked = [self.ask(messages, answer) for answer in answers]
        first = asked[0].exchange_id
        choices = [replace(one, group_id=first, group_size=len(asked), choice_of=first) for one in asked]
        self.written[-len(asked) :] = choices
        return choices

    def fail(
        self, messages: Sequence[Mapping[str, Any]], got: str | None = None, *, num_unsent: int = 0
    ) -> ExchangeFailed:
        """The client goes away; where it got something, more was sampled that it was not sent."""
        sampled = () if got is None else self.sampled(got) + (0,) * num_unsent
        exchange_id, delta, received_at_ms, _ = self._next(messages, b'{"model":"policy"}')
        exchange = ExchangeFailed(
            session_id=self.session_id,
            exchange_id=exchange_id,
            turn_type=TurnType.MAIN,
            client="headers",
            key_name=None,
            model="policy",
            request=delta,
            reason=FailureReason.CLIENT_GONE,
            status=None,
            detail="the client closed the connection",
            policy_id="policy",
            output_ids=sampled,
            received_at_ms=received_at_ms,
            finished_at_ms=received_at_ms + 500,
            message=None if got is None else json.dumps(assistant(got)).encode(),
            num_sent_tokens=None if got is None else len(sampled) - num_unsent,
            output_logprobs=None if got is None else (-0.5,) * len(sampled),
            versions=None if got is None else (VersionSpan(policy_version=3, num_tokens=len(sampled)),),
            sampling=None if got is None else _SAMPLING,
        )
        self.written.append(exchange)
        return exchange

    def done(self) -> SessionDone:
        after = self._parent.exchange_id if self._parent else None
        self.answers.clear()
        self.written.append(SessionDone(session_id=self.session_id, after_exchange_id=after))
        return self.written[-1]  # type: ignore[return-value]

    def rate(
        self, exchange_id: str, score: float | None, source: FeedbackSource = FeedbackSource.PERSON, *, name: str = "",
        text: str | None = None,
    ) -> FeedbackGiven:  # fmt: skip
        """Feedback on an answer; with a `name` it is the same feedback each time."""
        self.num_rated += 1
        given = FeedbackGiven(
            session_id=self.session_id,
            feedback_id=name or f"{self.session_id}-feedback-{self.num_rated}",
            turn_id=exchange_id,
            key_name=None,
            source=source,
            score=score,
            text="so so" if score is None and text is None else text,
            given_at_ms=0,
        )
        self.written.append(given)
        return given

    def forget(self) -> None:
        """The gateway starts again: the next request is written whole."""
        self._parent = None

    def _next(self, messages: Sequence[Mapping[str, Any]], options: bytes) -> tuple[str, RequestDelta, int, int]:
        self.num += 1
        exchange_id = derived_id("test", self.session_id, self.num)
        request = Request(messages=messages, raw=raw(messages), options=json.loads(options))
        prompt = continue_prompt(self.renderer, request, find_echoes(messages, self.answers if self.splices else ()))
        whole = WholeRequest(messages=raw(messages), token_ids=prompt.token_ids, options=options)
        delta = shorten(whole, self._parent)
        num_parents = (
            0 if delta.parent_exchange_id is None or self._parent is None else self._parent.request.num_parents
        )
        rebuilt = WholeRequest(
            messages=whole.messages,
            token_ids=whole.token_ids,
            options=options,
            num_parents=num_parents + (delta.parent_exchange_id is not None),
        )
        self._parent = Parent(exchange_id=exchange_id, request=rebuilt)
        return exchange_id, delta, self.num * SECOND_MS, prompt.num_spliced


def record(event: Event, topic: str = EXCHANGES, offset: int = 0, at_ms: int | None = None) -> Record:
    """The event as it stands on the log, by default at its offset in seconds."""
    return Record(
        topic=topic,
        partition=0,
        offset=offset,
        timestamp_ms=offset * SECOND_MS if at_ms is None else at_ms,
        key=event.key,
        event=event,
    )


def history(exchanges: Iterable[ExchangeCompleted]) -> dict[str, WholeRequest]:
    """Every exchange's whole request by exchange id; parents come before their children, repeats are harmless.

    Raises UnusableExchange where a parent is missing.
    """
    known: dict[str, WholeRequest] = {}
    for exchange in exchanges:
        if exchange.exchange_id not in known:
            known[exchange.exchange_id] = whole(exchange.request, known)
    return known
