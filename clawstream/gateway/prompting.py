"""Makes prompts of requests without blocking others: small ones at once, all others beside the event loop.

The client decides how long a prompt takes, so large prompts have threads of their own and a time bound. A thread can't
be ended, so one that is given up runs to its end. While all threads are busy, other large prompts are told to try
again; streams and small prompts go on.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from clawstream.conversation.continuing import Continued, Request, continue_prompt, find_echoes, num_new_bytes
from clawstream.errors import TryLater, UnrenderableRequest
from clawstream.gateway.sessions import KnownSession
from clawstream.rendering.renderer import PromptRenderer

_ASIDE_BYTES = 16_384  # a prompt with more new bytes is made in a thread, so that streams go on
_THREADS = 4


class PromptMaker:
    """Makes prompts by `renderer`, each within `within_s`."""

    def __init__(self, renderer: PromptRenderer, *, within_s: float) -> None:
        self._renderer = renderer
        self._within_s = within_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompts")

    def close(self) -> None:
        """Begin no more prompts."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def make(self, request: Request, known: KnownSession, *, context_length_tokens: int | None) -> Continued:
        """Return the request's prompt. Raises UnrenderableRequest, or TryLater where no thread is free in time."""
        echoes = find_echoes(request.messages, known.answers)

        def make() -> Continued:
            return continue_prompt(
                self._renderer, request, echoes, known.prompts, context_length_tokens=context_length_tokens
            )

        if num_new_bytes(request, echoes, known.prompts) < _ASIDE_BYTES:
            return make()
        return await self._aside(make)

    async def _aside(self, make: Callable[[], Continued]) -> Continued:
        making = self._threads.submit(make)
        try:
            async with asyncio.timeout(self._within_s):
                return await asyncio.wrap_future(making)
        except TimeoutError as error:
            if making.cancelled():  # the prompt was never begun
                raise TryLater("prompts that take long to be made are under way") from error
            raise UnrenderableRequest(f"its prompt was not made within {self._within_s:g} s; shorten it") from error
