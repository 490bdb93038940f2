"""The tokenizer in a model's folder. Some folders bring theirs as Python code, which is run only where it is trusted.

The settings decide whether that code is trusted; nobody is asked on a terminal. Code that is not trusted is an error.
"""

import json
import logging
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from clawstream.errors import ConfigError

# Errors of a folder's own code that does not fit its files or this version of transformers.
_UNLOADABLE = (OSError, ValueError, ImportError, AttributeError, TypeError, KeyError)


def load_tokenizer(folder: Path, *, trust_code: bool) -> Any:
    """Return the tokenizer; `trust_code` runs the folder's Python code if it needs any. Raises ConfigError."""
    if trust_code:
        # Kimi K2's tokenizer logs a warning for every text that it encodes.
        logging.getLogger("transformers_modules").setLevel(logging.ERROR)
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_code)
    except _UNLOADABLE as error:
        if not trust_code and _is_code(folder):
            raise ConfigError(
                f"{folder}: the tokenizer is Python code of the folder's own, which is not run. Read it, and set "
                "policy.trust_tokenizer_code = true to run it"
            ) from error
        raise ConfigError(f"{folder}: no tokenizer could be loaded ({error}); name a model folder") from error


def _is_code(folder: Path) -> bool:
    try:
        found = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and bool(found.get("auto_map"))
