"""How much memory a tree of processes holds: proportional set sizes, so that shared pages count once. Linux only."""

import asyncio
import contextlib

import psutil

JAVA = "java"  # the broker is counted apart
LOOK_EVERY_S = 2.0


class Footprint:
    """The largest footprint seen of this process and all below it, the JVM left out."""

    def __init__(self) -> None:
        self.peak_mb = 0.0

    async def watch(self) -> None:
        """Look again and again until cancelled."""
        while True:
            self.peak_mb = max(self.peak_mb, await asyncio.to_thread(_pss_mb))
            await asyncio.sleep(LOOK_EVERY_S)


def _pss_mb() -> float:
    me = psutil.Process()
    total_bytes = 0
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            if process.name() != JAVA:
                total_bytes += process.memory_full_info().pss
    return total_bytes / 2**20
