"""Finds the session of a request without a session id: the conversation that its history continues. Pure.

A conversation is recognised by a hash of all messages up to and including one of our answers, except a client's own
blocks and system prompts, which some clients rewrite each time. Within one trace (W3C's `traceparent`) the hash is of
the words of people, tools and the policy, without a client's frames, which OpenClaw omits when it asks again after
tools. The index is a fold over answered exchanges, so it is the same whether kept live or rebuilt from the log; time
comes in as an argument.

The one rule: two conversations are never joined because they lack a name. Where several sessions have the very same
messages, each is continued once before any is continued again; within one trace none is.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from clawstream.conversation.messages import Message, is_ephemeral, role_of, said_in, text_of, tool_calls_of

K = TypeVar("K")
V = TypeVar("V")

MAX_SESSIONS = 250_000  # and exchanges: about 1 kB each in all tables, so some 250 MB
_SHOWN_ROLES = ("user", "assistant", "tool")


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
        self._traced: OrderedDict[bytes, tuple[str | None, int]] = OrderedDict()  # None: several said the same

    def __len__(self) -> int:
        return len(self._answers)

    def newest_exchange(self, session_id: str) -> str | None:
        """Return the session's newest answered exchange."""
        found = self._newest.get(session_id)
        return found[0] if found else None

    def session_of(self, exchange_id: str) -> str | None:
        """Return the session in which the exchange was answered."""
        found = self._sessions.get(exchange_id)
        return found[0] if found else None

    def find(
        self, messages: tuple[Message, ...], scope: str, *, retried: bool, trace_id: str | None = None
    ) -> str | None:
        """Return the session that `messages` continue; None: there is none, or it is older than the window.

        A request equal to an earlier one belongs to that one's session; if its history has no answer, only when the
        client says that it retries.
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
        told = _told(messages, scope, trace_id)
        joined = None if told is None else self._traced.get(told)
        return None if joined is None else joined[0]

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
        told = _told((*messages, answer), scope, trace_id)
        if told is not None:
            before, _ = self._traced.get(told, (session_id, now_ms))
            self._newest_last(self._traced, told, (session_id if before == session_id else None, now_ms))
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


def _told(messages: tuple[Message, ...], scope: str, trace_id: str | None) -> bytes | None:
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
