"""A projector is frozen with rows to write, and wakes when another has written them: what the fence is there for.

Nothing here goes by the clock, as how long a machine takes to give a partition to another is not for us to say.
"""

import asyncio
import contextlib
import signal
from collections.abc import Mapping, Sequence

from tests.chaos.guards import FENCED, HOLDS, WROTE
from tests.chaos.installation import InstallationUnderTest, say
from tests.chaos.parts import Part
from tests.chaos.schedule import Kind

_ROUNDS = 3  # a projector that hears of its loss before it writes drops its rows: then the next round is for it
_WRITES_WITHIN_S = 45.0
_HOLDS_WITHIN_S = 15.0
_FENCED_WITHIN_S = 10.0  # of its waking
_LOOK_EVERY_S = 0.2


async def write_stale(installation: InstallationUnderTest) -> bool:
    """Return once a projector wrote, or was kept from writing, what another had claimed; False: it did not come to it.

    Rows must be coming, of one partition.
    """
    projectors = [part for part in installation.parts.values() if part.stage == "project"]
    begun = _ends(projectors)
    for _ in range(_ROUNDS):
        await _freeze_and_wake(installation, projectors)
        if await _said(projectors, FENCED, begun, within_s=_FENCED_WITHIN_S):
            return True
    return False


async def _freeze_and_wake(installation: InstallationUnderTest, projectors: Sequence[Part]) -> None:
    await _said(projectors, WROTE, _ends(projectors), within_s=_WRITES_WITHIN_S)
    since = _ends(projectors)
    await installation.database.stop()
    holder = await _said(projectors, HOLDS, since, within_s=_HOLDS_WITHIN_S)
    if holder is not None:  # none has any, as while the group reassigns partitions
        holder.send(signal.SIGSTOP)
    since = _ends(projectors)
    await installation.database.start()
    installation.applied[Kind.DATABASE_RESTART] += 1
    if holder is None:
        return
    installation.applied[Kind.FREEZE] += 1
    say(f"{holder.name} is frozen with rows to write")
    others = [part for part in projectors if part is not holder]
    writer = await _said(others, WROTE, since, within_s=_WRITES_WITHIN_S)
    holder.send(signal.SIGCONT)
    say(f"{holder.name} wakes; {'nobody' if writer is None else writer.name} has written")


def _ends(parts: Sequence[Part]) -> dict[str, int]:
    return {part.name: part.log.stat().st_size for part in parts}


async def _said(parts: Sequence[Part], words: str, since: Mapping[str, int], *, within_s: float) -> Part | None:
    """Return the first of the parts that says it after so many bytes of its log; None: none does in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while True:
                for part in parts:
                    if words.encode() in part.log.read_bytes()[since[part.name] :]:
                        return part
                await asyncio.sleep(_LOOK_EVERY_S)
    return None
