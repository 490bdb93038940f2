"""Reads, before an engine is shown a checkpoint, whether its tensors fit the model that the engine serves."""

from collections.abc import Iterable
from pathlib import Path

from clawstream.errors import UnusableCheckpoint
from clawstream.inference.models.model_folder import TensorHeader, tensor_headers, text_config
from clawstream.inference.models.version_folder import ADAPTER_CONFIG
from clawstream.weights.fitting import misfit


def unfit(checkpoint: Path, of_its_model: Iterable[Path]) -> str | None:
    """Return why the checkpoint must not be shown to an engine of the model; None: it fits, or that is not known.

    `of_its_model` are folders of the model; the first one whose weights can be read here is compared. Only headers are
    read.
    """
    if (checkpoint / ADAPTER_CONFIG).is_file():
        return (
            f"{checkpoint} is an adapter, and was published as full weights. It is not loaded and what is served "
            "stays; the policy's next step publishes one that is"
        )
    try:
        found = tensor_headers(checkpoint)
    except UnusableCheckpoint as error:
        return str(error)
    if found is None:
        return None
    for folder in of_its_model:
        expected = _headers(folder)
        if expected is None:
            continue
        wrong = misfit(found, expected, text_config(folder) or {})
        return wrong and (
            f"{checkpoint} is not a checkpoint of the model in {folder}, which is served: {wrong}. It is not loaded "
            "and what is served stays; publish a checkpoint of that model, or start the engines with another one"
        )
    return None


def _headers(folder: Path) -> dict[str, TensorHeader] | None:
    try:
        return tensor_headers(folder)
    except UnusableCheckpoint:
        return None
