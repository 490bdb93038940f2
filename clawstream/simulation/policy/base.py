"""Makes the folder of the tiny policy: unpacked from the package, or built by a process whose end frees torch's memory.

`pack` makes the package's files from a built policy. `unpack` makes a model folder from these files, with weights in
float32 as a built policy has them. `python -m clawstream.simulation.policy.build --pack FOLDER` makes the files again.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from clawstream.errors import PartUnavailable
from clawstream.simulation.policy.recipe import RECIPES, folder_of

SHIPPED = Path(__file__).parent / "shipped"
_WEIGHTS, _SEAL = "model.safetensors", "made_by.json"


def pack(folder: Path, into: Path, *, recipe: str) -> None:
    """Write the policy in `folder` to `into` in the form that the package ships; `recipe` is its recipe's digest."""
    into.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        shutil.copyfile(file, into / file.name)
    half = {name: tensor.astype(np.float16) for name, tensor in load_file(folder / _WEIGHTS).items()}
    save_file(half, into / _WEIGHTS, metadata={"format": "pt"})
    seal = {"recipe": recipe, "sha256": hashlib.sha256((into / _WEIGHTS).read_bytes()).hexdigest()}
    (into / _SEAL).write_text(json.dumps(seal, indent=1) + "\n")


def made_by() -> str:
    """Return the digest of the recipe that made what is shipped."""
    return str(_seal()["recipe"])


def unpack(folder: Path) -> None:
    """Make `folder` a whole model folder, if it is missing; raises PartUnavailable where the package is damaged."""
    shipped = (SHIPPED / _WEIGHTS).read_bytes()
    sha256, expected = hashlib.sha256(shipped).hexdigest(), _seal()["sha256"]
    if sha256 != expected:
        raise PartUnavailable(
            f"{SHIPPED / _WEIGHTS} has SHA-256 {sha256}, and {expected} is expected. Nothing was started. Install "
            "clawstream again, or check this file out again"
        )
    with drafted(folder) as draft:
        for file in SHIPPED.iterdir():
            if file.name not in (_WEIGHTS, _SEAL):
                shutil.copyfile(file, draft / file.name)
        whole = {name: tensor.astype(np.float32) for name, tensor in load_file(SHIPPED / _WEIGHTS).items()}
        save_file(whole, draft / _WEIGHTS, metadata={"format": "pt"})


@contextmanager
def drafted(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `folder` after the block; where the block fails, it is deleted.

    Of two processes that make the same folder at once, the first one's stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        yield draft
        try:
            draft.replace(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _seal() -> dict[str, str]:
    return dict(json.loads((SHIPPED / _SEAL).read_text()))


def base_policy(cache_dir: Path, base: str = "demo") -> Path:
    """Return the folder of the policy by a recipe; where it has to be built, progress goes to stderr."""
    folder = folder_of(cache_dir, RECIPES[base])
    if folder.is_dir():
        return folder
    if RECIPES[base].digest() == made_by():
        unpack(folder)
        return folder
    build = [sys.executable, "-m", "clawstream.simulation.policy.build", "--cache-dir", str(cache_dir), "--base", base]
    found = subprocess.run(build, stdout=subprocess.DEVNULL, check=False)
    if found.returncode != 0 or not folder.is_dir():
        raise PartUnavailable(
            f"the tiny policy could not be built (exit code {found.returncode}; its output is above). "
            "Nothing was started"
        )
    return folder
