"""YAML as Python values, by libyaml: in Python alone the manifests take ten times as long to read."""

from collections.abc import Iterator
from typing import Any

import yaml


def document(text: str) -> Any:
    """Return the only document of `text`."""
    return yaml.load(text, Loader=yaml.CSafeLoader)


def documents(text: str) -> Iterator[Any]:
    """Return each document of `text`."""
    return yaml.load_all(text, Loader=yaml.CSafeLoader)
