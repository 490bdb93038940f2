"""Model folders of the Qwen-VL families, without weights."""

import json
from pathlib import Path

from tests.parts.families.standins import FAMILIES, Tokens, make_folder

# What the makers' templates do with text and pictures: each message between two marks, a picture between two others.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SEEN_BY_28 = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 100_352}
MARKS = FAMILIES["qwen3.5"].special  # the families of one maker share these


def make_seeing(folder: Path, model_type: str = "qwen2_5_vl") -> Path:
    """Write a folder of the family's kind, and return it."""
    added = FAMILIES["qwen3.5"].added
    make_folder(folder, Tokens(model_type=model_type, special=MARKS, added=added, end="<|im_end|>", template=TEMPLATE))
    (folder / "preprocessor_config.json").write_text(json.dumps(SEEN_BY_28))
    return folder
