"""The pictures of conversations, each a file that is named after the SHA-256 of its bytes.

The log has marks that name them (a claim check: Hohpe and Woolf, Enterprise Integration Patterns). A picture that many
requests repeat is kept once. A file that is there is whole: it is written beside its place, without staying there.
"""

import asyncio
import base64
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from clawstream.conversation.messages import Message, text_of
from clawstream.conversation.pictures import Picture, Sight, pictures_in
from clawstream.gateway.requests.fields import BadRequest
from clawstream.gateway.requests.pictures import MOST_PICTURES, ShownPicture, check_whole, shows, with_marks

_AT_ONCE = 8  # requests whose pictures are read or kept
_MOST_CHARACTERS = 64 * 2**20  # of a conversation's pictures, in base64, each once
_MEDIA = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp", b"GIF8": "image/gif"}


@dataclass(frozen=True, slots=True)
class PictureStore:
    """A folder of pictures; several processes may write and read it."""

    folder: Path

    def put(self, shown: Iterable[ShownPicture]) -> None:
        """Keep each picture; one that is kept already becomes as new as today.

        Raises BadRequest for one that can't be decoded to its end, and OSError where nothing can be written.
        """
        for one in shown:
            path = self._path(one.picture.sha256)
            with suppress(FileNotFoundError):
                os.utime(path)
                continue
            check_whole(one)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".") as file:
                file.write(one.data)
                file.flush()
                os.fsync(file.fileno())
                with suppress(FileExistsError):
                    os.link(file.name, path)  # another request may have kept the same picture meanwhile

    def data_url(self, picture: Picture) -> str | None:
        """Return the picture as a data: URL; None: it was erased, or is somewhere else."""
        try:
            data = self._path(picture.sha256).read_bytes()
        except FileNotFoundError:
            return None
        media = next(media for begin, media in _MEDIA.items() if data.startswith(begin))
        return f"data:{media};base64,{base64.b64encode(data).decode()}"

    def kept(self) -> Iterator[tuple[str, int, float]]:
        """Return the hash of each picture, its bytes, and when it was last sent, in seconds since 1970."""
        for path in sorted(self.folder.glob("??/" + "[0-9a-f]" * 64)):
            with suppress(FileNotFoundError):
                found = path.stat()
                yield path.name, found.st_size, found.st_mtime

    def erase(self, sha256: str, *, sent_before_s: float | None = None) -> bool:
        """Remove a picture, unless it was sent since; return whether it was there and is gone."""
        path = self._path(sha256)
        try:
            if sent_before_s is not None and path.stat().st_mtime >= sent_before_s:
                return False
            path.unlink()
        except FileNotFoundError:
            return False
        return True

    def _path(self, sha256: str) -> Path:
        return self.folder / sha256[:2] / sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeing:
    """How the gateway takes pictures in, for a policy that sees them, and shows them to its engines."""

    sight: Sight
    store: PictureStore
    picture_id: int  # the token that pictures are made of
    # Threads of their own, and few, so that large pictures hold up nobody else.
    threads: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 2, thread_name_prefix="pictures"))
    places: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, _AT_ONCE))

    async def in_marks(self, body: Mapping[str, Any], seal: str) -> tuple[Mapping[str, Any], tuple[ShownPicture, ...]]:
        """Return the body with sealed marks in place of its pictures, and these. Raises BadRequest."""
        return await self._aside(with_marks, body, self.sight, seal) if shows(body) else (body, ())

    async def shown(
        self, messages: Sequence[Message], new: Sequence[ShownPicture], prompt_ids: Sequence[int]
    ) -> tuple[str, ...]:
        """Keep the new pictures, and return all of the conversation as data: URLs, in their order.

        Raises BadRequest for one that is missing, or can't be decoded or kept, and where the prompt does not show them.
        """
        found = [picture for message in messages for _, picture in pictures_in(text_of(message)) if picture is not None]
        num_tokens = prompt_ids.count(self.picture_id)
        if len(found) > MOST_PICTURES or num_tokens != sum(map(self.sight.num_tokens, found)):
            raise BadRequest(
                f"The conversation has {len(found)} pictures, and its prompt {num_tokens} tokens of pictures; expected "
                f"at most {MOST_PICTURES}, all in the prompt. Begin another conversation.",
                code="unsupported_content", param="messages",
            )  # fmt: skip
        urls: tuple[str, ...] = await self._aside(self._urls, found, new) if found else ()
        return urls

    async def _aside(self, work: Callable[..., Any], *given: Any) -> Any:
        if self.places.locked():
            raise BadRequest(
                f"{_AT_ONCE} requests with pictures are being read; nothing was generated. Try again.",
                status=503, code="service_unavailable", kind="server_error", retry_after_s=2,
            )  # fmt: skip
        async with self.places:
            return await asyncio.get_running_loop().run_in_executor(self.threads, work, *given)

    def _urls(self, pictures: Sequence[Picture], new: Sequence[ShownPicture]) -> tuple[str, ...]:
        try:
            self.store.put(new)
        except OSError as error:
            raise BadRequest(
                f"A picture can't be kept ({error.strerror}); nothing was generated. Try again.",
                status=503, code="service_unavailable", kind="server_error",
            ) from error  # fmt: skip
        urls: dict[str, str] = {}
        for picture in {one.sha256: one for one in pictures}.values():
            url = self.store.data_url(picture)
            if url is None:
                raise BadRequest(
                    f"The conversation has the picture {picture.sha256}, which was erased or never came here. Send it "
                    "again, or leave it out.",
                    code="picture_gone", param="messages",
                )  # fmt: skip
            urls[picture.sha256] = url
            if sum(map(len, urls.values())) > _MOST_CHARACTERS:
                raise BadRequest(
                    f"The conversation's pictures have over {_MOST_CHARACTERS} characters in base64. Begin another.",
                    code="unsupported_content", param="messages",
                )  # fmt: skip
        return tuple(urls[picture.sha256] for picture in pictures)
