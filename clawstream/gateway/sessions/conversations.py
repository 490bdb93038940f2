"""The conversation before each response, so that a client may name a response instead of sending it again. Pure.

For a forgotten response the client is asked to send the messages; nothing is guessed. The table is a fold over answered
exchanges, so it is the same whether kept live or rebuilt from the log. A response is its key's alone.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from clawstream.conversation.messages import Message, parse

MAX_BYTES = 128 * 2**20  # of messages as JSON; each response counts with all messages before it


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
        self._said: OrderedDict[str, _KeptResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._said)

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
        said = _KeptResponse(session_id=session_id, key_name=key_name, before=before, answer=answer, at_ms=at_ms)
        self._said[exchange_id] = said
        self._num_bytes += said.num_bytes
        while self._said:
            oldest = next(iter(self._said.values()))
            if self._num_bytes <= self._max_bytes and oldest.at_ms >= at_ms - self._window_ms:
                return
            self._said.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def recall(self, exchange_id: str, key_name: str | None) -> RecalledResponse | None:
        """Return the response; None: it is not known, or another key's."""
        said = self._said.get(exchange_id)
        if said is None or said.key_name not in (None, key_name):
            return None
        return RecalledResponse(
            session_id=said.session_id, before=tuple(map(parse, said.before)), answer=parse(said.answer)
        )
