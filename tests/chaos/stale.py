"""A projector is frozen with rows to write, and wakes when another has written them: what the fence is there for.

Nothing here goes by the clock, as how long a machine takes to give a partition to another is not for us to say.
"""

import asyncio
import contextlib
import signal
from collections.abc import Mapping, Sequence

from tests.chaos.guards import FENCED, HOLDS, WROTE
from tests.chaos.house import House
from tests.chaos.parts import Part
from tests.chaos.schedule import Kind

_WITHIN_S = 200.0
_HOLDS_WITHIN_S = 15.0
_FENCED_WITHIN_S = 10.0  # of its waking
_LOOK_EVERY_S = 0.2


async def write_stale(house: House) -> bool:
    """Return once a projector wrote, or was kept from writing, what another had claimed; False: it did not come to it.

    Rows must be coming, of one partition.
    """
    projectors = [part for part in house.parts.values() if part.stage == "project"]
    try:
        async with asyncio.timeout(_WITHIN_S):
            while True:
                await _freeze_and_wake(house, projectors)
                if await _fenced(projectors):
                    return True
    except TimeoutError:
        return False


async def _fenced(projectors: Sequence[Part]) -> bool:
    """Whether rows come to the fence; a projector that hears of its loss before it writes drops them, and none do."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FENCED_WITHIN_S):
            await _says(projectors, FENCED, since=dict.fromkeys(_ends(projectors), 0))
            return True
    return False


async def _freeze_and_wake(house: House, projectors: Sequence[Part]) -> None:
    holder = None
    while holder is None:
        await _says(projectors, WROTE, _ends(projectors))
        holder, since = await _frozen_with_rows(house, projectors)
        house.applied[Kind.DATABASE_RESTART] += 1
    house.applied[Kind.FREEZE] += 1
    try:
        await _says([part for part in projectors if part is not holder], WROTE, since)
    finally:
        holder.send(signal.SIGCONT)


async def _frozen_with_rows(house: House, projectors: Sequence[Part]) -> tuple[Part | None, Mapping[str, int]]:
    """Take the database away until a projector that has rows for it is frozen.

    Return that one, and where the logs ended then; None: none has any, as while the group gives partitions anew.
    """
    since = _ends(projectors)
    await house.database.stop()
    holder = None
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HOLDS_WITHIN_S):
                holder = await _says(projectors, HOLDS, since)
            holder.send(signal.SIGSTOP)
    finally:
        since = _ends(projectors)
        await house.database.start()
    return holder, since


def _ends(parts: Sequence[Part]) -> dict[str, int]:
    return {part.name: part.log.stat().st_size for part in parts}


async def _says(parts: Sequence[Part], words: str, since: Mapping[str, int]) -> Part:
    """Return the first of the parts that says it after so many bytes of its log."""
    while True:
        for part in parts:
            if words.encode() in part.log.read_bytes()[since[part.name] :]:
                return part
        await asyncio.sleep(_LOOK_EVERY_S)
