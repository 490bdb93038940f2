"""Which family's template a model folder has.

What a folder's architecture suggests is checked against the folder's own template.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from renderers import DefaultRendererConfig, config_from_name, create_renderer

from clawstream.rendering import mistral

LOG = logging.getLogger(__name__)

# Families by the architecture in config.json, where that decides the template; checked against the template itself.
_FAMILIES: Mapping[str, str] = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "glm4_moe": "glm-4.5",
    "deepseek_v3": "deepseek-v3",
    "gpt_oss": "gpt-oss",
    "kimi_k2": "kimi-k2",
    "llama": "llama-3",
    "minimax_m2": "minimax-m2",
}
_PROBE = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "v"},
)


def config_named(name: str, thinking: Mapping[str, bool]) -> Any:
    config = config_from_name(name)
    assert config is not None  # only "auto" has none, and it is resolved before
    unknown = set(thinking) - type(config).model_fields.keys()
    if unknown and name != "default":
        raise ValueError(f"the family {name} has no enable_thinking; leave policy.enable_thinking out")
    return type(config)(**thinking)


def family_config(tokenizer: Any, model_path: Path, thinking: Mapping[str, bool]) -> Any:
    """The family that the folder's architecture suggests, if it renders as the folder's own template does."""
    try:
        model_type = json.loads((model_path / "config.json").read_text()).get("model_type")
    except (OSError, ValueError):
        model_type = None
    family = _FAMILIES.get(model_type or "")
    if family is not None and _agrees(tokenizer, config_named(family, thinking), thinking):
        return config_named(family, thinking)
    known = tokenizer.get_vocab()
    parser = mistral.NAME if mistral.MARK in known else "qwen3" if "<tool_call>" in known else None
    LOG.warning(
        "renderer=default tool_parser=%s model_type=%s reason=%s",
        parser,
        model_type,
        "unknown architecture" if family is None else f"the template in {model_path} is not {family}'s",
    )
    return DefaultRendererConfig(tool_parser=parser, reasoning_parser="think", **thinking)


def _agrees(tokenizer: Any, config: Any, thinking: Mapping[str, bool]) -> bool:
    if not tokenizer.chat_template:
        return True
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    probe = list(_PROBE)[-1:] if thinking.get("enable_thinking") is False else list(_PROBE)
    theirs = tokenizer.apply_chat_template(probe, **options, **thinking)
    return bool(create_renderer(tokenizer, config).render_ids(probe, add_generation_prompt=True) == list(theirs))
