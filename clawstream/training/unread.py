"""A Hugging Face model before its weights are read, for those that read a part of them each."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from clawstream.errors import ConfigError
from clawstream.inference.model_folder import tensor_headers, text_config
from clawstream.training.base_folder import unloadable

_READ_AS_THEY_ARE = frozenset({"F64", "F32", "F16", "BF16"})


def unread(folder: Path) -> Any:
    """Return the folder's model as it is but for its weights, which take no memory until they are written.

    Raises UnusableCheckpoint where the folder names no model, ConfigError where its weights are quantized.
    """
    refuse_quantized(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with no_init_weights():
            core = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise unloadable(folder, error) from error
    core.tie_weights()
    core.name_or_path = str(folder)
    return core.eval()


def refuse_quantized(folder: Path) -> None:
    """Raise ConfigError where what a folder's files hold has to be computed with before it is the model's weights."""
    found = None
    if said := (text_config(folder) or {}).get("quantization_config"):
        found = f"config.json has a quantization_config, quant_method = {said.get('quant_method')!r}"
    for name, header in (tensor_headers(folder) or {}).items():
        if name.endswith(".weight") and header.dtype not in _READ_AS_THEY_ARE:
            found = f"{name} is stored as {header.dtype}"
            break
    if found is not None:
        raise ConfigError(
            f"{folder}: {found}, expected weights in F32, BF16 or F16: the fsdp and Megatron trainers read them as "
            "they are stored, without scales. Nothing is trained. Name a folder of the same model that is not "
            "quantized."
        )
