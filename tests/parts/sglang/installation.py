"""SGLang in an environment of its own, with what it needs to start on a machine without a GPU.

Its kernels link the CUDA driver even where they are never called. A stub of the driver's entry points that they name,
each of which returns "no device", lets them load; the model then runs on torch's own operators.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clawstream import locks
from clawstream.local.servers import accounts

VERSION = "0.5.23"
INSTALL_WITHIN_S = 1200.0
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
# The driver's names begin with cu and a capital; those of its libraries, which are installed, do not.
_DRIVER = re.compile(r"\bU (cu[A-Z]\w*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangInstallation:
    """Where SGLang is: its interpreter, and the folder of the stub."""

    python: Path
    stub: Path


def sglang_installation() -> SglangInstallation:
    """SGLang, installed below the user's cache folder if it is not there, whole (10 GB, minutes)."""
    folder = accounts.cache_folder() / f"sglang-{VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    found = SglangInstallation(python=folder / "venv" / "bin" / "python", stub=folder / "stub")
    partial = folder / "partial"  # while it is here, whatever lies beside it was not finished
    with locks.locked(folder.with_suffix(".lock"), within_s=INSTALL_WITHIN_S):
        if partial.exists() or not _is_installed(found.python):
            partial.touch()
            print(f"tests: installing SGLang {VERSION} into {folder} (10 GB, once)", file=sys.stderr, flush=True)
            uv = ("uv",) if shutil.which("uv") else (sys.executable, "-m", "uv")
            run((*uv, "venv", "-q", "--clear", "--python", "3.11", str(folder / "venv")))
            run(
                (*uv, "pip", "install", "-q", "--compile-bytecode", "--python", str(found.python), f"sglang=={VERSION}")
            )
            partial.unlink()
        if not (found.stub / "libcuda.so.1").is_file():
            _build_stub(found)
    return found


def _is_installed(python: Path) -> bool:
    code = f"import importlib.metadata as m; assert m.version('sglang') == '{VERSION}'"
    return (
        python.exists() and subprocess.run((str(python), "-c", code), check=False, capture_output=True).returncode == 0
    )


def _build_stub(installed: SglangInstallation) -> None:
    installed.stub.mkdir(exist_ok=True)
    source = installed.stub / "cuda.c"
    names = sorted(set(_driver_names(installed.python)))
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names))
    partial = installed.stub / "libcuda.partial"
    run(("gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(partial), str(source)))
    partial.rename(installed.stub / "libcuda.so.1")


def _driver_names(python: Path) -> Iterator[str]:
    site = run((str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")).strip()
    libraries_of_cuda = ("cuda", "cublas", "cusolver", "cufft", "curand", "cusparse", "cupti", "cudnn")
    for library in Path(site, "sgl_kernel").rglob("*.so"):
        for name in _DRIVER.findall(run(("nm", "-D", "--undefined-only", str(library)))):
            if not name.startswith(libraries_of_cuda):
                yield name


def run(command: Sequence[str]) -> str:
    """What the command printed; raises RuntimeError with its complaint where it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=INSTALL_WITHIN_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:4])} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout
