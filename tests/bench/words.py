"""What the mock engine and the load generator talk with: a byte-pair tokenizer of the family, and its whole words.

It is trained on the text of Python's own manual, which every Python carries.
"""

import json
import re
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.parts.engine.tiny_model import SPECIAL_TOKENS

VOCABULARY_TOKENS = 8_000
# How Qwen splits a text before byte pairs are merged: the larger part of what tokenising costs.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_words(folder: Path) -> tuple[Path, Path]:
    """Return a model's folder that has only a tokenizer, and a file with its tokens that are a space and a word."""
    model_path, vocabulary = folder / "model", folder / "vocabulary.json"
    text = list(topics.values())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCABULARY_TOKENS, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    fast.save_pretrained(model_path)
    (model_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    words = Counter(re.findall(r" [a-z]{2,12}(?= )", "\n".join(text)))
    encoded = {word: fast.encode(word, add_special_tokens=False) for word, _ in words.most_common()}
    tokens = [{"id": ids[0], "text": word} for word, ids in encoded.items() if len(ids) == 1]
    vocabulary.write_text(json.dumps(tokens))
    return model_path, vocabulary
