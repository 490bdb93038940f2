"""Prompts of requests, made aside where they are long, so that streams go on meanwhile."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from clawstream.conversation.continuing import Continued, Request, continue_prompt, find_echoes, num_new_bytes
from clawstream.errors import TryLater, UnrenderableRequest
from clawstream.gateway.sessions import KnownSession
from clawstream.rendering.renderer import PromptRenderer

_ASIDE_BYTES = 16_384  # a prompt with more new bytes is made in a thread
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
        arguments = (self._renderer, request, echoes, known.prompts)
        make = partial(continue_prompt, *arguments, context_length_tokens=context_length_tokens)
        if num_new_bytes(request, echoes, known.prompts) < _ASIDE_BYTES:
            return make()
        making = self._threads.submit(make)
        try:
            async with asyncio.timeout(self._within_s):
                return await asyncio.wrap_future(making)
        except TimeoutError as error:
            if making.cancelled():  # the prompt was never begun
                raise TryLater("all threads for large prompts are busy") from error
            raise UnrenderableRequest(f"its prompt was not made within {self._within_s:g} s; shorten it") from error
