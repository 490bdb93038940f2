"""GPT-OSS's own vocabulary, which came with SGLang, as the model folder that transformers would have of it."""

import base64
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

_VOCABULARY = "lib/python3.11/site-packages/tml_renderers/data/o200k_base.tiktoken"
_WORDS = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_NAMED = {2: "return", 3: "constrain", 5: "channel", 6: "start", 7: "end", 8: "message", 12: "call", 18: "endofprompt"}


def make_gpt_oss(folder: Path, environment: Path) -> Path:
    """Write the folder, with the vocabulary that lies in SGLang's `environment`, and return it."""
    lines = (line.split() for line in (environment / _VOCABULARY).read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = bytes_to_unicode()

    def spelt(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges: list[tuple[str, str]] = []
    for token in ranks:
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = sorted(
            (ranks[left], ranks[right], left, right) for left, right in splits if {left, right} <= ranks.keys()
        )
        merges.extend((spelt(left), spelt(right)) for _, _, left, right in known)
    tokenizer = Tokenizer(BPE({spelt(token): rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    special = ["<|startoftext|>", "<|endoftext|>"]
    special += [f"<|{_NAMED.get(at, f'reserved_{200_000 + at}')}|>" for at in range(19)]
    fast.add_tokens([AddedToken(token, normalized=False, special=True) for token in special], special_tokens=True)
    fast.eos_token = "<|return|>"
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "transformers_version": "4.55.0"}))
    return folder
