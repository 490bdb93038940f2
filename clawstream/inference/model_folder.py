"""What a model's folder says of the model, without loading it; and whether its tokenizer fits it.

A folder that can't be seen from here is no error: an engine may run on another machine, or name its model by a hub's
id. A model may have more embeddings than its tokenizer has tokens; many are padded.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from clawstream.errors import UnusableCheckpoint

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """What a safetensors file says of a tensor before its numbers."""

    dtype: str  # as safetensors names it: F32, BF16, I8, F8_E4M3, ...
    shape: tuple[int, ...]


def text_config(folder: Path) -> dict[str, Any] | None:
    """Return what config.json says of the language model; None where it can't be read."""
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    inner = found.get("text_config")
    return found | inner if isinstance(inner, dict) else found


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder, complete. Raises UnusableCheckpoint."""
    index = folder / INDEX
    try:
        listed = json.loads(index.read_bytes())["weight_map"].values() if index.is_file() else [SINGLE]
        names = set(listed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableCheckpoint(f"{index} can't be read ({error}); the weights in use stay") from error
    absent = sorted(name for name in names if not (folder / name).is_file())
    if absent:
        raise UnusableCheckpoint(f"{folder} has no {absent[0]}; the weights in use stay, give a complete model folder")
    return [folder / name for name in sorted(names)]


def tensor_headers(folder: Path) -> dict[str, TensorHeader] | None:
    """Return the headers of all tensors by name; None where no weights in safetensors can be seen.

    Raises UnusableCheckpoint where a file that must be there is not, or is cut short.
    """
    if not ((folder / INDEX).is_file() or (folder / SINGLE).is_file()):
        return None
    found: dict[str, TensorHeader] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    tensor = tensors.get_slice(name)
                    found[name] = TensorHeader(dtype=tensor.get_dtype(), shape=tuple(tensor.get_shape()))
        except (OSError, SafetensorError) as error:
            raise UnusableCheckpoint(f"{file}: {error}; the weights in use stay, write the checkpoint again") from error
    return found


_SPREAD = 2000


def largest_token_id(folder: Path, added: Iterable[int]) -> int:
    """Return the largest id that the tokenizer in `folder` can give, including `added`, ids added to it later.

    Without a tokenizer.json only `added` are known.
    """
    tokenizer = vocabulary(folder)
    known = () if tokenizer is None else tokenizer.get_vocab(with_added_tokens=True).values()
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
