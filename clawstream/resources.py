"""Finds the folders that ship with the package, and the checkout that clawstream was installed from.

In the repository the folders are at the top, where people read them; in a wheel they are inside the package.
"""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlparse

_PACKAGE = Path(__file__).parent


def folder(name: Literal["schemas", "topics", "migrations", "docs"]) -> Path:
    """Return the folder `name`, from the installed package or else from the checkout."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def how_to_install(extra: str) -> str:
    """Return how to install an extra of clawstream from the checkout that it was installed from."""
    checkout = _checkout()
    if checkout is None:
        return f"Install clawstream from its checkout with the extra `{extra}`: pip install 'FOLDER[{extra}]'"
    return f"Install them: pip install '{checkout}[{extra}]', or there: uv sync --extra {extra}"


def _checkout() -> Path | None:
    """Return the folder that clawstream runs from or was installed from; None: it is unknown."""
    if (here := own_checkout()) is not None:
        return here
    try:
        said = distribution("clawstream").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    url = urlparse(json.loads(said)["url"]) if said else None
    return Path(unquote(url.path)) if url is not None and url.scheme == "file" else None


def own_checkout() -> Path | None:
    """Return the checkout whose code this is; None where it was installed."""
    here = Path(__file__).parents[1]
    return here if (here / "pyproject.toml").is_file() else None
