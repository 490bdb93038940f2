"""Whether a checkpoint's tensors are those of the model that an engine serves. Pure.

SGLang (0.5.23) copies a checkpoint tensor by tensor into the weights it serves. At the first tensor that does not fit
it reads the same checkpoint again, and its process ends. A missing tensor keeps its old numbers, without an error.
"""

import re
from collections.abc import Mapping
from typing import Any

from clawstream.inference.models.model_folder import TensorHeader

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # cast to the served type, as they are copied
# Trained on text, a checkpoint need not have them: prediction heads for later tokens, and the towers of other media.
_BESIDE_TEXT = re.compile(r"(^|\.)(mtp|visual|vision_\w+|audio_\w+|multi_modal_projector)\.|\.inv_freq$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_HEAD = "lm_head.weight"


def misfit(
    found: Mapping[str, TensorHeader], expected: Mapping[str, TensorHeader], config: Mapping[str, Any]
) -> str | None:
    """Return which tensors of a checkpoint differ from `expected`, the tensors that the model of `config` has.

    None: it fits. Floating-point precisions are not compared, since they are cast.
    """
    new, old = _by_place(found), _by_place(expected)
    wrong = [
        f"{name}: found {_shown(new.get(name))}, expected {_shown(old.get(name))}"
        for name in sorted(new.keys() | old.keys())
        if not _fits(name, new.get(name), old.get(name), config)
    ]
    if not wrong:
        return None
    return wrong[0] if len(wrong) == 1 else f"{wrong[0]}; and {len(wrong) - 1} tensors more do not fit"


def _by_place(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """The language model's tensors have the same place alone and inside a model of several media."""
    return {name.replace("language_model.", ""): header for name, header in tensors.items()}


def _fits(name: str, new: TensorHeader | None, old: TensorHeader | None, config: Mapping[str, Any]) -> bool:
    if new is None or old is None:
        return _may_lack(name, config)
    same_numbers = new.dtype == old.dtype or {new.dtype, old.dtype} <= _FLOATS
    return same_numbers and new.shape == old.shape


def _may_lack(name: str, config: Mapping[str, Any]) -> bool:
    if name.endswith(_HEAD):
        return config.get("tie_word_embeddings") is not False  # many families leave it out of their config.json
    layer, num_layers = _LAYER.search(name), config.get("num_hidden_layers")
    beyond = layer is not None and isinstance(num_layers, int) and int(layer[1]) >= num_layers
    return beyond or _BESIDE_TEXT.search(name) is not None


def _shown(header: TensorHeader | None) -> str:
    return "nothing" if header is None else f"{header.dtype} {list(header.shape)}"
