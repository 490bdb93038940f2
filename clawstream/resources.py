"""Where the files that travel with the package are: schemas, topics, migrations, and docs/dictionary.md.

They stand at the top of the repository for people to read; a wheel carries them inside the package.
"""

from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).parent


def folder(name: Literal["schemas", "topics", "migrations", "docs"]) -> Path:
    """Return the folder `name`, from the installed package or else from the checkout."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
