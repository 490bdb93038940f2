"""Where clawstream was installed from: its extras come from there alone, as no registry has this package."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse


def how_to_install(extra: str) -> str:
    """Return how to install an extra of clawstream from the checkout that it was installed from."""
    checkout = _checkout()
    if checkout is None:
        return f"Install clawstream from its checkout with the extra `{extra}`: pip install 'FOLDER[{extra}]'"
    return f"Install them: pip install '{checkout}[{extra}]', or there: uv sync --extra {extra}"


def _checkout() -> Path | None:
    """Return the folder that clawstream runs from or was installed from; None: it is not known."""
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
    here = Path(__file__).parents[2]
    return here if (here / "pyproject.toml").is_file() else None
