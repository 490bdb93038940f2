"""A model's tokenizer: how it is loaded, and how templates encode with it.

A mark is a token added to the vocabulary, as `<|im_start|>` is. A mark in a message's text is encoded as letters, so
that only the template puts marks into a prompt. The exceptions are the marks that templates themselves write as text
(of thinking and of tool calls), since these can't be told apart from a user's.

A template's code walks over each id several times, but never looks at the ids of plain text. So a long text passes
through it as one id, a LongText, which `spread` replaces by its ids. A folder's own Python code is run only where the
settings trust it.
"""

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from clawstream.conversation.pictures import END, Picture, Sight, pictures_in, without_marks
from clawstream.errors import ConfigError

MAX_TOKENS = 2_000_000  # tokens that are remembered, each in about 36 bytes
LONG_TOKENS = 64
_NO_TOKEN = -1  # the int value of a LongText, which equals no mark's id
# Marks that the families' templates write as text, in headers and around tool calls.
WRITTEN_AS_TEXT = frozenset(
    {
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    }
)
# Headers that the families' templates write before an answer; renderers that go on from sampled tokens look for them.
ANSWER_HEADERS = frozenset(
    {
        *("<|im_start|>assistant\n", "<\uff5cAssistant\uff5c>", "<|im_assistant|>assistant<|im_middle|>", "]~b]ai\n"),
        *("<assistant>", "<\uff5chy_Assistant:opensource\uff5c>"),
    }
)
# Errors of a folder's own code that does not fit its files or this version of transformers.
_UNLOADABLE = (OSError, ValueError, ImportError, AttributeError, TypeError, KeyError)
_WORD_BEGINS = "\u2581"  # in vocabularies of sentencepiece


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


class _Wrapper:
    """The part of a tokenizer that renderers use, apart from encoding.

    It gives no character offsets, so renderers attribute no tokens to messages.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.name_or_path: str = tokenizer.name_or_path
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Return the text of the ids."""
        return without_marks(str(self._tokenizer.decode(token_ids, **options)))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of each token, marks included."""
        return self._tokenizer.convert_tokens_to_ids(tokens)


class RememberingTokenizer(_Wrapper):
    """A tokenizer that remembers the ids of recent texts, but for very long ones; safe to use from several threads."""

    def __init__(self, tokenizer: Any, *, max_tokens: int = MAX_TOKENS) -> None:
        super().__init__(tokenizer)
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._encoded: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._changing = threading.Lock()

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

    def _remember(self, text: str, ids: tuple[int, ...]) -> None:
        with self._changing:
            if text in self._encoded or len(ids) > self._max_tokens // 8:
                return
            self._encoded[text] = ids
            self._num_tokens += len(ids)
            while self._num_tokens > self._max_tokens:
                _, oldest = self._encoded.popitem(last=False)
                self._num_tokens -= len(oldest)


class PlainText(_Wrapper):
    """A tokenizer that encodes marks as letters, apart from those that templates write as text.

    A text without such a mark keeps its ids. With `sight`, a picture's mark becomes the tokens of the picture, and the
    text before and after it is encoded apart, as the model's own processor does.
    """

    def __init__(self, tokenizer: Any, sight: Sight | None = None) -> None:
        super().__init__(tokenizer)
        self._sight = sight
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._marks = sorted(set(tokenizer.get_added_vocab()) - WRITTEN_AS_TEXT)
        self._mark = re.compile(f"(?={'|'.join(map(re.escape, self._marks))})")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`, with each mark encoded as its letters."""
        assert not add_special_tokens  # templates write their own
        if self._sight is None or END not in text:
            return self._written(text)
        return list(chain.from_iterable(self._seen(piece, picture) for piece, picture in pictures_in(text)))

    def _seen(self, before: str, picture: Picture | None) -> Iterator[int]:
        """Return the ids of a text and of the picture behind it."""
        if before:
            yield from self._written(before)
        if picture is not None and (sight := self._sight) is not None:
            begin, pad, end = (
                self._tokenizer.convert_tokens_to_ids(mark) for mark in (sight.begin, sight.pad, sight.end)
            )
            yield begin
            yield from (pad for _ in range(sight.num_tokens(picture)))
            yield end

    def _written(self, text: str) -> list[int]:
        if not any(mark in text for mark in self._marks):
            return self._ids(text)
        # Cutting a mark after its first letter makes it plain text: the tokenizer itself can ignore all marks or none.
        cuts = [0, *(found.start() + 1 for found in self._mark.finditer(text)), len(text)]
        return list(chain.from_iterable(self._ids(text[start:end]) for start, end in pairwise(cuts)))

    def _ids(self, text: str) -> list[int]:
        if self._fast is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        # Encoding without offsets is a third less work.
        return list(self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids)


class TemplateTokenizer(_Wrapper):
    """The tokenizer of one renderer: `marked` encodes until `seal`, then `plain` does.

    Some renderers, when they are made, encode marks to learn their ids. A text that is exactly one of `always_marked`
    is always encoded by `marked`: only templates may write these. Once sealed, a long text's ids are one LongText.
    """

    def __init__(self, marked: Any, plain: Any, always_marked: frozenset[str] = frozenset()) -> None:
        super().__init__(plain)
        self._encoder = self._marked = marked
        self._always_marked = always_marked

    def seal(self) -> None:
        """Encode marks in text as letters from now on."""
        self._encoder = self._tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`."""
        encoder = self._marked if text in self._always_marked else self._encoder
        ids = list(encoder.encode(text, add_special_tokens=add_special_tokens))
        return [LongText.of(ids)] if encoder is self._tokenizer and len(ids) >= LONG_TOKENS else ids


def load_tokenizer(folder: Path, *, trust_code: bool) -> Any:
    """Return the tokenizer; `trust_code` runs the folder's Python code if it needs any. Raises ConfigError."""
    if trust_code:
        # Kimi K2's tokenizer logs a warning for every text that it encodes.
        logging.getLogger("transformers_modules").setLevel(logging.ERROR)
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_code)
    except _UNLOADABLE as error:
        if not trust_code and _is_code(folder):
            raise ConfigError(
                f"{folder}: the tokenizer is Python code of the folder's own, which is not run. Read it, and set "
                "policy.trust_tokenizer_code = true to run it"
            ) from error
        raise ConfigError(f"{folder}: no tokenizer could be loaded ({error}); name a model folder") from error


def _is_code(folder: Path) -> bool:
    try:
        found = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and bool(found.get("auto_map"))


def token_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """Return each token's bytes, by id; None for an id without a token, or of a special one never written as text."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    kinds = _kinds(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder is not None else set()
    found: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, number in vocabulary.items():
        mark = added.get(number)
        if mark is None:
            found[number] = _bytes_of(token, kinds)
        elif not mark.special or mark.content in WRITTEN_AS_TEXT:
            found[number] = str(mark.content).encode()
    return found


def _bytes_of(token: str, kinds: set[str]) -> bytes | None:
    if "ByteLevel" in kinds:
        known = _of_letters()
        return bytes(known[letter] for letter in token) if all(letter in known for letter in token) else token.encode()
    if "ByteFallback" in kinds and len(token) == 6 and token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_WORD_BEGINS, " ").encode() if kinds & {"Metaspace", "ByteFallback"} else token.encode()


def _kinds(decoder: dict[str, Any]) -> set[str]:
    return {str(decoder["type"])}.union(*(_kinds(part) for part in decoder.get("decoders", ())))


@cache
def _of_letters() -> dict[str, int]:
    """Return the byte for each letter of a byte-level vocabulary; letters from 256 on stand for unprintable bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
