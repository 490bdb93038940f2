"""Exchanges: one request and what was answered, as the gateway saw it; the turns of a session, and its end.

An exchange holds only the new part of its request. `RequestDelta` names the parent exchange and how much of the
parent's request is kept; `clawstream.conversation.history` rebuilds whole requests.

A turn is an answer and what happened next. It is named by the exchange that answered.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from clawstream.events.base import LogProbs, SessionEvent, TokenIds

GREEDY_BELOW = 1e-6  # below this temperature the likeliest token is drawn, and its log-prob is that at temperature 1


class TurnType(StrEnum):
    """Whether a request is part of the conversation (main) or the client's own housekeeping (side)."""

    MAIN = "main"
    SIDE = "side"


class FinishReason(StrEnum):
    """Why an answer ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class FailureReason(StrEnum):
    """Why the client did not get the exchange's answer to its end."""

    CLIENT_GONE = "client_gone"
    ENGINE_REFUSED = "engine_refused"
    ENGINE_FAILED = "engine_failed"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """`num_tokens` consecutive output tokens, all sampled by `policy_version`."""

    policy_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBias:
    """`bias` is added to the token's logit at every position."""

    token_id: int
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """Parameters that change the policy's own distribution, by SGLang's names; of the last three at most one is set."""

    frequency_penalty: float = 0.0  # subtracted from a token's logit per occurrence in the answer
    presence_penalty: float = 0.0  # subtracted once if the token occurs in the answer
    repetition_penalty: float = 1.0  # divides the logit of a token that occurs in the answer; multiplies a negative one
    min_p: float = 0.0  # a token below this share of the likeliest one's probability is not drawn
    min_new_tokens: int = 0  # the answer can't end before it has this many tokens
    logit_bias: tuple[TokenBias, ...] = ()
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    @property
    def has_grammar(self) -> bool:
        """Whether the answer had to follow a grammar."""
        return (self.json_schema, self.regex, self.ebnf) != (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the answer's tokens were sampled."""

    temperature: float  # below GREEDY_BELOW: greedy
    top_p: float
    top_k: int | None  # None: no limit
    max_tokens: int
    seed: int | None  # None: the engine's choice
    stop: tuple[str, ...]
    shaping: Shaping | None = None  # None: the distribution is the policy's own
    limit_by_client: bool = True  # the client's max_tokens is the limit; False: the gateway's default or the context is

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always drawn, so that the same weights repeat the same answer."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def of_the_policy(self) -> bool:
        """Whether each token was drawn with the probability that its log-prob states, as training assumes."""
        whole = self.top_p >= 1 and (self.top_k is None or self.top_k < 1)
        return self.temperature >= GREEDY_BELOW and whole and self.shaping is None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDelta:
    """The part of a request that its parent's request does not hold.

    The whole request's messages are the parent's first `kept_messages`, then `messages`. Its prompt is the parent's
    first `kept_tokens` prompt tokens, then `token_ids`. Its options are `options`, or the parent's where `options` is
    None. Without a parent nothing is kept and `options` is not None.
    """

    parent_exchange_id: str | None
    kept_messages: int
    kept_tokens: int
    messages: tuple[bytes, ...]  # each as JSON, in Chat Completions' form, with marks or words in place of pictures
    token_ids: TokenIds
    options: bytes | None  # the body without `messages`, as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExchangeEvent(SessionEvent):
    """What became of an accepted request."""

    IDENTITY: ClassVar = ("exchange_id",)

    exchange_id: str  # also the OpenAI response id, less its "chatcmpl-"
    turn_type: TurnType
    client: str  # the client profile by which session and turn type were found: "openclaw", "headers", "history", ...
    key_name: str | None  # the name of the API key that the request had; None: the gateway asks for no keys
    model: str  # as the client named it
    request: RequestDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCompleted(_ExchangeEvent):
    """An answer that was generated to its end. It is on Kafka or in the spool before the client gets the last chunk."""

    request_sha256: str  # of the whole body without stream options; equal for a retry
    retry_count: int | None  # what the client's retry header says; None: no such header
    sampling: Sampling
    policy_id: str
    versions: tuple[VersionSpan, ...]  # in output order; their num_tokens sum to len(output_ids)
    message: bytes  # the assistant message as answered, as JSON
    output_ids: TokenIds  # as sampled, the stop token included
    output_logprobs: LogProbs  # one per output id, at the sampling temperature, or at 1 below GREEDY_BELOW
    finish_reason: FinishReason
    cached_tokens: int | None  # prompt tokens that the engine had cached; None: not reported
    num_spliced: int  # how many earlier answers stand in the prompt as the very tokens that were sampled
    trace_id: str | None  # of the request's traceparent
    received_at_ms: int  # since the epoch, UTC, as are the next two
    first_token_at_ms: int | None  # None: the answer has no tokens
    finished_at_ms: int
    group_id: str | None = None  # the task that the session, or this choice alone, is an attempt at; None: not said
    group_size: int | None = None  # how many attempts the group has; None: not said
    step_index: int | None = None  # of this turn in its attempt; None: the turn's number in its session counts
    choice_of: str | None = None  # the first exchange of a request with several answers; None: this is its only answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFailed(_ExchangeEvent):
    """An accepted request whose answer the client did not get to its end."""

    reason: FailureReason
    status: int | None  # the engine's HTTP status; None: there was none
    detail: str
    policy_id: str
    output_ids: TokenIds  # the tokens that were sampled before the exchange ended
    received_at_ms: int
    finished_at_ms: int
    message: bytes | None = None  # JSON of what the client got; None: nothing, several answers, or it did not leave
    num_sent_tokens: int | None = None  # of output_ids; None, here and in the next three fields: there is no `message`
    output_logprobs: LogProbs | None = None  # one per output id, at the sampling temperature
    versions: tuple[VersionSpan, ...] | None = None  # one span for all tokens; None also where the version is not known
    sampling: Sampling | None = None

    @property
    def is_interrupted(self) -> bool:
        """Whether the client got a part of the answer, to which a person may react."""
        return self.message is not None and self.turn_type is TurnType.MAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDone(SessionEvent):
    """The client said that the session is over."""

    IDENTITY: ClassVar = ("session_id", "after_exchange_id")

    after_exchange_id: str | None  # the session's newest answered exchange; None: none is known


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionIdle(SessionEvent):
    """No request of the session came for `idle_s` after this exchange, by the append times of the log's records."""

    IDENTITY: ClassVar = ("session_id", "after_exchange_id")

    after_exchange_id: str
    idle_s: int


class OrphanReason(StrEnum):
    """Why no later request of the session shows what came of an answer."""

    EDITED = "edited"  # the history holds another assistant message in its place
    COMPACTED = "compacted"  # the history is shorter than it was, and the answer is not in it
    REGENERATED = "regenerated"  # another answer to the same request was echoed: it was asked again, or had several
    RESET = "reset"  # the history starts over


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPaired(SessionEvent):
    """The answer of exchange `turn_id` came back in the history of `next_exchange_id`: it was delivered.

    An interrupted answer was delivered in part; the history goes on after the question, with or without that part. The
    next state is one reply of the user, or the results of all parallel tool calls, without what a client adds itself.
    """

    IDENTITY: ClassVar = ("turn_id",)

    turn_id: str
    next_exchange_id: str
    next_state: tuple[int, ...]  # indices into the whole request's messages, ascending, not empty
    interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOrphaned(SessionEvent):
    """The session went on without echoing this answer. No judge is asked about it; a sample of it needs feedback."""

    IDENTITY: ClassVar = ("turn_id",)

    turn_id: str
    next_exchange_id: str
    reason: OrphanReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsSettled(SessionEvent):
    """The session is over or idle, and every pairing that its exchanges show stands before this event on the topic.

    Written for sessions with at least one answer that could become a turn.
    """

    IDENTITY: ClassVar = ("session_id", "after_exchange_id", "done")

    after_exchange_id: str  # the session's newest exchange
    done: bool  # True: the client said that it is over; False: it is idle, and a later request may still echo answers
