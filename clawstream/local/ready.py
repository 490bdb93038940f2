"""Whether a server does its work yet."""

from collections.abc import Awaitable, Callable

import aiohttp


def answers(http: aiohttp.ClientSession, url: str) -> Callable[[], Awaitable[bool]]:
    """Return what asks `url`, and says whether it answered 200."""

    async def ready() -> bool:
        try:
            async with http.get(url) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    return ready
