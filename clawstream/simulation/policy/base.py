"""The folder of the tiny policy: the package's own, or built by a process that gives torch's memory back."""

import subprocess
import sys
from pathlib import Path

from clawstream.errors import PartUnavailable
from clawstream.simulation.policy import shipped
from clawstream.simulation.policy.recipe import RECIPES, place


def base_policy(cache_dir: Path, base: str = "demo") -> Path:
    """Return the folder of the policy by a recipe; where it has to be built, progress goes to stderr."""
    folder = place(cache_dir, RECIPES[base])
    if folder.is_dir():
        return folder
    if RECIPES[base].digest() == shipped.made_by():
        shipped.unpack(folder)
        return folder
    command = [
        sys.executable,
        "-m",
        "clawstream.simulation.policy.build",
        "--cache-dir",
        str(cache_dir),
        "--base",
        base,
    ]
    found = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if found.returncode != 0 or not folder.is_dir():
        raise PartUnavailable(
            f"the tiny policy could not be built (exit code {found.returncode}; its words are above). "
            "Nothing was started"
        )
    return folder
