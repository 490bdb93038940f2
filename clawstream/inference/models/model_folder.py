"""What a model's folder says of the model, without loading it: its configuration, its weight files, their tensors.

A folder that can't be seen from here is no error: an engine may run on another machine, or name its model by a hub's
id.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

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
