"""Whether a tokenizer can give ids that a model has no embedding for: one such id ends the process of SGLang (0.5.23).

A model may have more embeddings than its tokenizer has tokens; many are padded.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from clawstream.inference.model_folder import text_config


def largest_token_id(folder: Path, added: Iterable[int]) -> int:
    """Return the largest id that the tokenizer in `folder` can give, `added` among them, which were added to it later.

    Where it has no tokenizer.json, only those are known.
    """
    file = folder / "tokenizer.json"
    known = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values() if file.is_file() else ()
    return max((*known, *added), default=-1)


def too_small_for(token_id: int, folder: Path) -> str | None:
    """Return why the model in `folder` can't be given the id; None: it can, or its config.json can't be read here."""
    size = (text_config(folder) or {}).get("vocab_size")
    if not isinstance(size, int) or token_id < size:
        return None
    return f"the policy's tokenizer can give id {token_id}, and the vocab_size of {folder / 'config.json'} is {size}"
