"""The published description of the gateway's routes."""

from importlib.resources import files

import orjson
import yaml


def openapi_json() -> bytes:
    """Return openapi.yaml as JSON."""
    return orjson.dumps(yaml.safe_load(files(__package__).joinpath("openapi.yaml").read_text()))
