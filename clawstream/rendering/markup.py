"""Text that looks like a template's marks stays text: nobody ends a turn, or opens one, by writing its mark.

The one rule: only the template puts a mark into a prompt. Marks that templates themselves write as text (those of
thinking and of tool calls) can't be told from a user's text and stay marks, as in the families' own templates.
"""

import re
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

from clawstream.rendering.encoding import LONG_TOKENS, LongText

# Marks that the families' templates write as text, in headers and around tool calls.
WRITTEN_AS_TEXT = frozenset(
    {
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    }
)


class PlainText:
    """The tokenizer underneath, except that `encode` treats marks that templates set by id as letters.

    A text without such a mark keeps its ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._marks = sorted(set(tokenizer.get_added_vocab()) - WRITTEN_AS_TEXT)
        self._mark = re.compile(f"(?={'|'.join(map(re.escape, self._marks))})")
        self.name_or_path: str = tokenizer.name_or_path
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`, in which a mark is the letters it is written with."""
        assert not add_special_tokens  # templates write their own
        if not any(mark in text for mark in self._marks):
            return self._ids(text)
        # A mark that is cut behind its first letter is plain text; the tokenizer itself can ignore all marks or none.
        cuts = [0, *(found.start() + 1 for found in self._mark.finditer(text)), len(text)]
        return list(chain.from_iterable(self._ids(text[start:end]) for start, end in pairwise(cuts)))

    def _ids(self, text: str) -> list[int]:
        if self._fast is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        # Without offsets, which is a third less work.
        return list(self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Return the text of the ids."""
        return str(self._tokenizer.decode(token_ids, **options))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of each token, marks included."""
        return self._tokenizer.convert_tokens_to_ids(tokens)


# Headers that the families' templates write before an answer; renderers that go on from sampled tokens look for them.
ANSWER_HEADERS = frozenset(
    {
        *("<|im_start|>assistant\n", "<\uff5cAssistant\uff5c>", "<|im_assistant|>assistant<|im_middle|>", "]~b]ai\n"),
        *("<assistant>", "<\uff5chy_Assistant:opensource\uff5c>"),
    }
)


class TemplateTokenizer:
    """The tokenizer of one renderer: `marked` encodes until `seal`, then `plain` does.

    Some renderers, when they are made, encode marks to learn their ids. `marked` always encodes the whole texts in
    `always_marked`, which only templates may write. Once sealed, a long text's ids are one LongText.
    """

    def __init__(self, marked: Any, plain: Any, always_marked: frozenset[str] = frozenset()) -> None:
        self._encoder = marked
        self._marked = marked
        self._always_marked = always_marked
        self._plain = plain
        self.name_or_path: str = marked.name_or_path
        self.unk_token_id: int | None = marked.unk_token_id
        self.eos_token_id: int | None = marked.eos_token_id

    def seal(self) -> None:
        """From now on marks in text are letters."""
        self._encoder = self._plain

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`."""
        encoder = self._marked if text in self._always_marked else self._encoder
        ids = list(encoder.encode(text, add_special_tokens=add_special_tokens))
        return [LongText.of(ids)] if encoder is self._plain and len(ids) >= LONG_TOKENS else ids

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Return the text of the ids."""
        return str(self._plain.decode(token_ids, **options))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of each token."""
        return self._plain.convert_tokens_to_ids(tokens)
