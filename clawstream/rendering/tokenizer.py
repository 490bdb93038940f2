"""The tokenizer in a model's folder, and the bytes of its tokens.

Some folders bring theirs as Python code, which is run only where it is trusted.

The settings decide whether that code is trusted; nobody is asked on a terminal. Code that is not trusted is an error.
"""

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from clawstream.errors import ConfigError
from clawstream.rendering.encoding import WRITTEN_AS_TEXT

# Errors of a folder's own code that does not fit its files or this version of transformers.
_UNLOADABLE = (OSError, ValueError, ImportError, AttributeError, TypeError, KeyError)


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


_WORD_BEGINS = "\u2581"  # in vocabularies of sentencepiece


def token_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """Return each token's bytes, by id; None for special tokens and for ids without a token."""
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
    """Return the types of a decoder's parts."""
    return {str(decoder["type"])}.union(*(_kinds(part) for part in decoder.get("decoders", ())))


@cache
def _of_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for; unprintable ones are letters from 256."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
