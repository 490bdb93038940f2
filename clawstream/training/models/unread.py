"""A Hugging Face model before its weights are read, for processes that each read a part of them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from clawstream.training.models.base_folder import unloadable


def unread(folder: Path) -> Any:
    """Return the folder's model as it is but for its weights, which take no memory until they are written.

    Raises UnusableCheckpoint where the folder names no model.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with no_init_weights():
            core = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise unloadable(folder, error) from error
    core.tie_weights()
    core.name_or_path = str(folder)
    return core.eval()
