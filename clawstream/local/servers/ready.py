"""Whether a server is ready to work."""

import json
from collections.abc import Awaitable, Callable

import aiohttp


def answers(http: aiohttp.ClientSession, url: str) -> Callable[[], Awaitable[str | None]]:
    """Return a function that asks `url` and returns why it did not answer 200 (the page's words, if any), or None."""

    async def missing() -> str | None:
        try:
            async with http.get(url, allow_redirects=False) as response:
                if response.status == 200:
                    return None
                return _problems(await response.text()) or f"{url} answers HTTP {response.status}"
        except (aiohttp.ClientError, TimeoutError):
            return f"{url} does not answer"

    return missing


def _problems(page: str) -> str:
    """The problems on the gateway's /readyz; empty on a page of another kind."""
    try:
        return "; ".join(str(part["problem"]) for part in json.loads(page)["missing"])
    except (ValueError, KeyError, TypeError):
        return ""
