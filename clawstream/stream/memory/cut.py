"""A connection that ends in the middle of something, as a killed process's does. For tests of what survives.

The one rule: the operation under way never returns, and no later operation has any effect.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self


class ConnectionCut:
    """Ends a connection at its n-th operation: before the operation has taken effect, or right after."""

    def __init__(self, *, operations: int | None, takes_effect: bool) -> None:
        self._left = operations
        self._takes_effect = takes_effect
        self.happened = asyncio.Event()

    @classmethod
    def never(cls) -> Self:
        """Return a cut that never happens."""
        return cls(operations=None, takes_effect=False)

    @asynccontextmanager
    async def around(self) -> AsyncIterator[None]:
        """Run the block as one operation, unless the connection is cut."""
        await asyncio.sleep(0)
        now = self._counted()
        if self.happened.is_set() and not (now and self._takes_effect):
            await self._for_ever()
        yield
        if now:
            await self._for_ever()
        await asyncio.sleep(0)

    def _counted(self) -> bool:
        if self.happened.is_set() or self._left is None:
            return False
        self._left -= 1
        if self._left > 0:
            return False
        self.happened.set()
        return True

    async def _for_ever(self) -> None:
        await asyncio.get_running_loop().create_future()
