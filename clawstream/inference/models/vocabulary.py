"""Whether a tokenizer can give ids that a model has no embedding for: one such id ends the process of SGLang (0.5.23).

A model may have more embeddings than its tokenizer has tokens; many are padded.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from clawstream.inference.models.model_folder import text_config

_SPREAD = 2000


def largest_token_id(folder: Path, added: Iterable[int]) -> int:
    """Return the largest id that the tokenizer in `folder` can give, including `added`, ids added to it later.

    Without a tokenizer.json only `added` are known.
    """
    file = folder / "tokenizer.json"
    known = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values() if file.is_file() else ()
    return max((*known, *added), default=-1)


def too_small_for(token_id: int, folder: Path) -> str | None:
    """Return why the model in `folder` can't be given the id; None: it can, or its config.json can't be read here."""
    size = num_embeddings(folder)
    if size is None or token_id < size:
        return None
    return f"the policy's tokenizer can give id {token_id}, and the vocab_size of {folder / 'config.json'} is {size}"


def num_embeddings(folder: Path) -> int | None:
    """Return how many token ids the model in `folder` has; None where its config.json does not say it here."""
    size = (text_config(folder) or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def vocabulary(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of the model in `folder`; None where it has no tokenizer.json."""
    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def difference(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    """Return the first token of ours that is not theirs under the same id; None: there is none."""
    known = theirs.get_vocab(with_added_tokens=True)
    for token, id_ in sorted(ours.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]):
        if known.get(token) != id_:
            return f"token {token!r} has id {known.get(token)}, expected {id_}"
    return None


def spread(tokenizer: Tokenizer) -> str:
    """Return a text of tokens from all over the vocabulary, `_SPREAD` of them at most."""
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    chosen = ids[:: max(1, len(ids) // _SPREAD)]
    return "\n".join(tokenizer.decode([id_], skip_special_tokens=False) for id_ in chosen)
