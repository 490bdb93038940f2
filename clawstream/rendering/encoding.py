"""A tokenizer that caches what it encodes, since each request of a conversation repeats all earlier messages.

Ids are those of the tokenizer underneath. It gives no character offsets, which only training masks need, so renderers
skip the work of attributing tokens to messages.

A template's code walks over each id of a prompt several times, but never looks at the ids of plain text. So a long text
passes through it as one id, a LongText, and `spread` puts its ids in that place afterwards.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

MAX_TOKENS = 2_000_000  # remembered; a token takes 8 bytes here
LONG_TOKENS = 64
_NO_TOKEN = -1  # the int value of a LongText, which equals no mark's id


class LongText(int):
    """A text's ids, passed as one id."""

    ids: Sequence[int]

    @classmethod
    def of(cls, ids: Sequence[int]) -> "LongText":
        """Return a LongText for `ids`."""
        found = cls(_NO_TOKEN)
        found.ids = ids
        return found


def spread(ids: Sequence[int]) -> tuple[int, ...]:
    """Return the ids with each LongText replaced by its own ids."""
    found: list[int] = []
    start = 0
    for _ in range(ids.count(_NO_TOKEN)):
        at = ids.index(_NO_TOKEN, start)
        long = ids[at]
        assert isinstance(long, LongText), f"a template wrote the id {long}"
        found += ids[start:at]
        found += long.ids
        start = at + 1
    found += ids[start:]
    return tuple(found)


class RememberingTokenizer:
    """The tokenizer methods that renderers use, and no others; safe to use from several threads."""

    def __init__(self, tokenizer: Any, *, max_tokens: int = MAX_TOKENS) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._encoded: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._changing = threading.Lock()
        self.name_or_path: str = tokenizer.name_or_path
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`; no special tokens are added around it."""
        assert not add_special_tokens  # templates write their own
        with self._changing:
            known = self._encoded.get(text)
            if known is not None:
                self._encoded.move_to_end(text)
                return list(known)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        self._remember(text, tuple(ids))
        return ids

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Return the text of the ids."""
        return str(self._tokenizer.decode(token_ids, **options))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of each token."""
        return self._tokenizer.convert_tokens_to_ids(tokens)

    def _remember(self, text: str, ids: tuple[int, ...]) -> None:
        """Keep the newest texts, up to so many tokens in all."""
        with self._changing:
            if text in self._encoded or len(ids) > self._max_tokens // 8:
                return
            self._encoded[text] = ids
            self._num_tokens += len(ids)
            while self._num_tokens > self._max_tokens:
                _, oldest = self._encoded.popitem(last=False)
                self._num_tokens -= len(oldest)
