"""Installs ahead of time what tests of SGLang and of clients install: `python -m tests.prefetch sglang openclaw`.

By the names of their marks; all where none is named. Each is installed by the function that its tests call, which lets
one process install at a time, and nobody take what is half there for whole. What can't be had is named and shown, and
the rest goes on: the tests that need it try again, and fail by it. Others go before it at processor and disk.
"""

import argparse
import subprocess
import sys
import time
import traceback
from collections.abc import Callable

import psutil

from clawstream.errors import PartUnavailable
from tests.parts.sglang.installation import sglang_installation
from tests.parts.vllm.installation import vllm_installation
from tests.system.clients import javascript, python
from tests.system.containers import images
from tests.system.openclaw.client import openclaw_installation
from tests.system.tinker import skyrl

INSTALLS: dict[str, tuple[Callable[[], object], ...]] = {
    "sglang": (sglang_installation,),
    "vllm": (vllm_installation,),
    "openclaw": (openclaw_installation,),
    "node": (javascript.openai, javascript.ai_sdk),
    "sdks": (python.install, skyrl.installation),
    "containers": (images.all_of_them,),
}


def main(arguments: list[str]) -> int:
    """1 where something could not be installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("marks", nargs="*", metavar="MARK", help=", ".join(INSTALLS))
    marks = parser.parse_args(arguments).marks or [*INSTALLS]
    if unknown := {*marks} - {*INSTALLS}:
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(INSTALLS)}")
    this = psutil.Process()
    this.nice(10)
    this.ionice(psutil.IOPRIO_CLASS_BE, 7)
    missing = [mark for mark in marks if not _installed(mark)]
    return 1 if missing else 0


def _installed(mark: str) -> bool:
    began = time.monotonic()
    try:
        for install in INSTALLS[mark]:
            install()
    except (OSError, ValueError, RuntimeError, subprocess.SubprocessError, PartUnavailable) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")
        print(f"tests: {mark} could not be installed:\n{traceback.format_exc()}{said}", file=sys.stderr, flush=True)
        return False
    print(f"tests: {mark} is installed after {time.monotonic() - began:.0f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
