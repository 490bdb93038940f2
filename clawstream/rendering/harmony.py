"""GPT-OSS's encoder with the vocabulary that lies in the model's folder: its makers' package would fetch it.

The encoder checks the vocabulary's hash itself, so another model's folder is an error, never a wrong prompt.
"""

import base64
import os
import tempfile
from pathlib import Path
from typing import Any

from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding
from renderers import gpt_oss
from transformers.convert_slow_tokenizer import bytes_to_unicode

_FOLDER_SETTING = "TIKTOKEN_ENCODINGS_BASE"


def use_vocabulary_of(tokenizer: Any) -> None:
    """Have every GPT-OSS renderer made from now on encode with the vocabulary of `tokenizer`.

    Raises ValueError where that vocabulary is not GPT-OSS's.
    """
    before = os.environ.get(_FOLDER_SETTING)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "o200k_base.tiktoken").write_bytes(_as_tiktoken(tokenizer))
        os.environ[_FOLDER_SETTING] = folder
        try:
            encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        except HarmonyError as error:
            raise ValueError(f"its tokenizer does not have GPT-OSS's vocabulary ({error})") from error
        finally:
            del os.environ[_FOLDER_SETTING]
            if before is not None:
                os.environ[_FOLDER_SETTING] = before
    gpt_oss.load_harmony_encoding = lambda _name: encoding  # else each renderer loads it again, which takes a second


def _as_tiktoken(tokenizer: Any) -> bytes:
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    added = tokenizer.get_added_vocab()
    ranks = sorted((rank, token) for token, rank in tokenizer.get_vocab().items() if token not in added)
    try:
        spelt = [(bytes(letters[letter] for letter in token), rank) for rank, token in ranks]
    except KeyError as error:
        raise ValueError(f"its tokenizer is not byte-level: a token holds {error}") from error
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in spelt)
