"""What the gateway remembers of sessions: which session a request continues, and what was sampled in it. Pure.

A restart rebuilds all tables from the exchanges on the log, except the prompts and the requests without an answer.
Time comes in as an argument. Forgetting costs tokens and time, never an answer: the prompt of a forgotten session is
rendered again, and a client that names a forgotten response is asked for its messages.

A conversation without a session id is recognised by a hash of all messages up to and including one of our answers. The
hash leaves out system prompts and a client's own blocks, which some clients rewrite each time. Where several sessions
have the very same messages, each is continued once before any is continued again; a request that is equal to an earlier
one goes to that one's session.

A second hash holds only the words of people, tools and the policy, within one trace (W3C's `traceparent`). It is needed
because OpenClaw wraps text around a person's words, and omits it when it asks again after tools. Where several sessions
have this hash in common, none of them is continued.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from clawstream.conversation.continuing import Continued, ShownAnswer
from clawstream.conversation.messages import Message, is_ephemeral, parse, role_of, said_in, text_of, tool_calls_of
from clawstream.gateway.outbox.recorder import PARENT_FOR_MS

K = TypeVar("K")
V = TypeVar("V")

MAX_SESSIONS = 250_000  # also the most exchanges; one takes about 1 kB in all tables together
_SHOWN_ROLES = ("user", "assistant", "tool")
MAX_BYTES = 128 * 2**20  # of messages as JSON; each response counts with all messages before it
MAX_TOKENS = 4_000_000  # of all sessions together, if there are several; a token takes about 36 bytes here
MAX_ANSWERS = 2_048  # of one session; older ones are in no history that fits a context
_PROMPTS = 2  # two, so that a side turn between main turns costs nothing


@dataclass(slots=True, kw_only=True)
class _Answer:
    """An answer of ours, and the sessions that got it; those in `continued` have had their next request."""

    sessions: list[str]
    continued: set[str] = field(default_factory=set)
    at_ms: int


class SessionIndex:
    """Sessions by their messages, for `window_ms`; no table has more than `max_sessions` entries."""

    def __init__(self, window_ms: int, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._window_ms = window_ms
        self._max_sessions = max_sessions
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._asked: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        self._newest: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._sessions: OrderedDict[str, tuple[str, int]] = OrderedDict()  # by exchange
        self._traced: OrderedDict[bytes, tuple[str | None, int]] = OrderedDict()  # None: of several sessions

    def __len__(self) -> int:
        return len(self._answers)

    def newest_exchange(self, session_id: str) -> str | None:
        """Return the session's newest answered exchange."""
        return self._newest.get(session_id, (None, 0))[0]

    def session_of(self, exchange_id: str) -> str | None:
        """Return the session in which the exchange was answered."""
        return self._sessions.get(exchange_id, (None, 0))[0]

    def find(
        self, messages: tuple[Message, ...], scope: str, *, retried: bool, trace_id: str | None = None
    ) -> str | None:
        """Return the session that `messages` continue; None: none is known.

        A request equal to an earlier one belongs to the earlier one's session. Where its history has no answer, that
        holds only if the client says that it retries.
        """
        digests = list(_digests(messages, scope))
        ours = [digest for digest, role in digests if role == "assistant"]
        if digests and (ours or retried):
            asked = self._asked.get(digests[-1][0])
            if asked is not None:
                return asked[0]
        for digest in reversed(ours):
            answer = self._answers.get(digest)
            if answer is not None:
                fresh = [session for session in answer.sessions if session not in answer.continued]
                return (fresh or answer.sessions)[-1]
        traced = _traced_digest(messages, scope, trace_id)
        return None if traced is None else self._traced.get(traced, (None, 0))[0]

    def asked(self, messages: tuple[Message, ...], scope: str, session_id: str, now_ms: int) -> None:
        """Note a request of the session: from now on its last answer counts as continued."""
        digests = list(_digests(messages, scope))
        if digests:
            self._newest_last(self._asked, digests[-1][0], (session_id, now_ms))
        for digest, _ in digests:
            answer = self._answers.get(digest)
            if answer is not None and session_id in answer.sessions:
                answer.continued.add(session_id)

    def answered(
        self,
        messages: tuple[Message, ...],
        answer: Message,
        scope: str,
        session_id: str,
        exchange_id: str,
        now_ms: int,
        trace_id: str | None = None,
    ) -> None:
        """Note an answer of the session, and forget entries older than the window."""
        *_, (digest, _) = _digests((*messages, answer), scope)
        found = self._answers.get(digest) or _Answer(sessions=[], at_ms=now_ms)
        found.at_ms = now_ms
        if session_id in found.sessions:
            found.sessions.remove(session_id)
        found.sessions.append(session_id)
        found.continued.discard(session_id)
        self._newest_last(self._answers, digest, found)
        self._newest_last(self._newest, session_id, (exchange_id, now_ms))
        self._newest_last(self._sessions, exchange_id, (session_id, now_ms))
        traced = _traced_digest((*messages, answer), scope, trace_id)
        if traced is not None:
            before, _ = self._traced.get(traced, (session_id, now_ms))
            self._newest_last(self._traced, traced, (session_id if before == session_id else None, now_ms))
        self._forget(now_ms - self._window_ms)

    def _forget(self, before_ms: int) -> None:
        while self._answers and next(iter(self._answers.values())).at_ms < before_ms:
            self._answers.popitem(last=False)
        for table in (self._asked, self._newest, self._sessions, self._traced):
            while table and next(iter(table.values()))[1] < before_ms:
                table.popitem(last=False)

    def _newest_last(self, table: OrderedDict[K, V], key: K, value: V) -> None:
        table[key] = value
        table.move_to_end(key)
        if len(table) > self._max_sessions:
            table.popitem(last=False)


def _digests(messages: tuple[Message, ...], scope: str) -> Iterator[tuple[bytes, str]]:
    """Yield, for each message that counts, the hash of the messages up to and including it, and its role."""
    chain = hashlib.blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=16)
    for message in messages:
        role = role_of(message)
        if role not in _SHOWN_ROLES or is_ephemeral(message):
            continue
        calls = [(call.name, call.arguments) for call in tool_calls_of(message)]
        chain.update(f"\x1e{role}\x1f{text_of(message).strip()}\x1f".encode("utf-8", "surrogatepass"))
        chain.update(json.dumps(calls).encode("ascii") if calls else b"[]")
        yield chain.digest(), role


def _traced_digest(messages: tuple[Message, ...], scope: str, trace_id: str | None) -> bytes | None:
    """Return a hash of a trace's messages up to the last answer; None: there is no trace, or no answer."""
    last = max((at for at, message in enumerate(messages) if role_of(message) == "assistant"), default=None)
    if trace_id is None or last is None:
        return None
    said = [
        meaning
        for message in messages[: last + 1]
        if role_of(message) in _SHOWN_ROLES and not is_ephemeral(message)
        for meaning in said_in(message)
    ]
    whole = repr((trace_id, scope, said))  # of strings and None alone
    return hashlib.blake2b(whole.encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecalledResponse:
    """A response: its session, the messages before it without its request's instructions, and its own message."""

    session_id: str
    before: tuple[Message, ...]
    answer: Message


Recall = Callable[[str], RecalledResponse | None]  # a response's exchange id; None: not known, or another key's


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptResponse:
    session_id: str
    key_name: str | None
    before: tuple[bytes, ...]
    answer: bytes
    at_ms: int

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.before)) + len(self.answer)


class Conversations:
    """Responses by exchange id, for `window_ms`; beyond `max_bytes` the oldest are dropped."""

    def __init__(self, window_ms: int, *, max_bytes: int = MAX_BYTES) -> None:
        self._window_ms = window_ms
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, _KeptResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def answered(
        self,
        exchange_id: str,
        *,
        session_id: str,
        key_name: str | None,
        before: tuple[bytes, ...],
        answer: bytes,
        at_ms: int,
    ) -> None:
        """Add the answer of an exchange; forget responses older than the window or beyond `max_bytes`."""
        kept = _KeptResponse(session_id=session_id, key_name=key_name, before=before, answer=answer, at_ms=at_ms)
        self._kept[exchange_id] = kept
        self._num_bytes += kept.num_bytes
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if self._num_bytes <= self._max_bytes and oldest.at_ms >= at_ms - self._window_ms:
                return
            self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def recall(self, exchange_id: str, key_name: str | None) -> RecalledResponse | None:
        """Return the response; None: it is not known, or another key's."""
        kept = self._kept.get(exchange_id)
        if kept is None or kept.key_name not in (None, key_name):
            return None
        before = tuple(map(parse, kept.before))
        return RecalledResponse(session_id=kept.session_id, before=before, answer=parse(kept.answer))


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSession:
    """One session: its answers and its newest prompts, oldest first."""

    answers: tuple[ShownAnswer, ...] = ()
    prompts: tuple[Continued, ...] = ()
    at_ms: int = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens are held for it."""
        held = sum(len(answer.output_ids) for answer in self.answers)
        return held + sum(len(prompt.token_ids) for prompt in self.prompts)


class SampledAnswers:
    """What was sampled in each session; beyond `max_tokens` in all, the sessions silent for longest are dropped."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._sessions: OrderedDict[str, tuple[KnownSession, int]] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def of(self, session_id: str, now_ms: int) -> KnownSession:
        """Return the session's answers and prompts; none if it is unknown or was silent for over PARENT_FOR_MS."""
        known, _ = self._sessions.get(session_id, (KnownSession(), 0))
        return known if now_ms - known.at_ms <= PARENT_FOR_MS else KnownSession()

    def asked(self, session_id: str, prompt: Continued, now_ms: int) -> None:
        """Remember a prompt of the session."""
        known = self.of(session_id, now_ms)
        others = tuple(one for one in known.prompts if one.token_ids != prompt.token_ids)
        self._remember(session_id, replace(known, prompts=(*others, prompt)[-_PROMPTS:], at_ms=now_ms))

    def answered(self, session_id: str, answer: ShownAnswer, now_ms: int) -> None:
        """Remember an answer of the session."""
        known = self.of(session_id, now_ms)
        self._remember(session_id, replace(known, answers=(*known.answers, answer)[-MAX_ANSWERS:], at_ms=now_ms))

    def forget(self, session_id: str) -> None:
        """Forget the session."""
        _, num_tokens = self._sessions.pop(session_id, (None, 0))
        self._num_tokens -= num_tokens

    def _remember(self, session_id: str, known: KnownSession) -> None:
        self.forget(session_id)
        self._sessions[session_id] = known, known.num_tokens
        self._num_tokens += known.num_tokens
        while len(self._sessions) > 1:
            oldest, (others, _) = next(iter(self._sessions.items()))
            if self._num_tokens <= self._max_tokens and known.at_ms - others.at_ms <= PARENT_FOR_MS:
                return
            self.forget(oldest)
