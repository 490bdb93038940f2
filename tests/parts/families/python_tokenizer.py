"""A tokenizer in Python, laid out as Kimi K2's: tiktoken's ranks in a file, and marks in the configuration."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from clawstream.rendering.families import _as_tiktoken

_CODE = r"""
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, added_tokens_decoder, **options):
        marks = {token.content: number for number, token in added_tokens_decoder.items()}
        ranks = load_tiktoken_bpe(vocab_file)
        self.model = tiktoken.Encoding(name="kimi", pat_str=WORDS, mergeable_ranks=ranks, special_tokens=marks)
        self.letters = bytes_to_unicode()
        self.bytes = {letter: byte for byte, letter in self.letters.items()}
        self.ids = {"".join(self.letters[byte] for byte in piece): rank for piece, rank in ranks.items()}
        self.pieces = {number: piece for piece, number in self.ids.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder, **options)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return self.ids | self.get_added_vocab()

    def _tokenize(self, text, **options):
        return [self.pieces[number] for number in self.model.encode(text, disallowed_special=())]

    def _convert_token_to_id(self, token):
        return self.ids.get(token)

    def _convert_id_to_token(self, index):
        return self.pieces.get(index)

    def convert_tokens_to_string(self, tokens):
        return bytes(self.bytes[letter] for letter in "".join(tokens)).decode("utf-8", "replace")
"""


def in_python(folder: Path) -> Path:
    """Rewrite a stand-in's folder so that its tokenizer is Python code, and return it."""
    fast: Any = AutoTokenizer.from_pretrained(str(folder))
    file = folder / "tokenizer_config.json"
    marks = {
        str(number): {
            "content": token.content,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
            "special": True,
        }
        for number, token in fast.added_tokens_decoder.items()
    }
    (folder / "tiktoken.model").write_bytes(_as_tiktoken(fast))
    (folder / "tokenization_kimi.py").write_text(_CODE)
    (folder / "tokenizer.json").unlink()
    config = json.loads(file.read_text()) | {
        "added_tokens_decoder": marks,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
    }
    file.write_text(json.dumps(config))
    return folder
