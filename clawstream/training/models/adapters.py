"""LoRA adapters as peft makes and names them, whoever trains them."""

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

STEM = "adapter_model"  # of the file with an adapter's weights


def with_adapter(core: Any, rank: int, seed: int) -> PeftModel:
    """Put an adapter into the model, whose numbers follow from the seed, and so do the bytes of its files."""
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    torch.manual_seed(seed)
    adapter: PeftModel = get_peft_model(core, config)
    found = adapter.peft_config["default"]
    assert isinstance(found, LoraConfig)
    found.target_modules = sorted(found.target_modules or ())  # a set by now, in another order in each process
    return adapter


def saved_name(name: str) -> str:
    """Return the name that an adapter's weight has in its file."""
    return "base_model.model." + name.replace(".default.", ".")
