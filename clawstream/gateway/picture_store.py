"""The pictures of conversations, each a file that is named after the SHA-256 of its bytes.

The log has marks that name them (a claim check: Hohpe and Woolf, Enterprise Integration Patterns). A picture that many
requests repeat is kept once. A file that is there is whole: it is written beside its place, without staying there.
"""

import asyncio
import base64
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from clawstream.conversation.messages import Message, text_of
from clawstream.conversation.pictures import Picture, Sight, pictures_in
from clawstream.gateway.requests.fields import BadRequest
from clawstream.gateway.requests.pictures import ShownPicture, check_whole, with_marks

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
    # A thread of its own, so that large pictures hold up nobody else.
    thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, thread_name_prefix="pictures"))

    async def in_marks(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[ShownPicture, ...]]:
        """Return the body with marks in place of its pictures, and these. Raises BadRequest."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, with_marks, body, self.sight)

    async def shown(self, messages: Sequence[Message], new: Sequence[ShownPicture]) -> tuple[str, ...]:
        """Keep the new pictures, and return all of the conversation as data: URLs, in their order.

        Raises BadRequest for one that is missing, or can't be decoded or kept.
        """
        found = [picture for message in messages for _, picture in pictures_in(text_of(message)) if picture is not None]
        if not found:
            return ()
        return await asyncio.get_running_loop().run_in_executor(self.thread, self._urls, found, new)

    def _urls(self, pictures: Sequence[Picture], new: Sequence[ShownPicture]) -> tuple[str, ...]:
        try:
            self.store.put(new)
        except OSError as error:
            raise BadRequest(
                f"A picture can't be kept ({error.strerror}); nothing was generated. Try again.",
                status=503, code="service_unavailable", kind="server_error",
            ) from error  # fmt: skip
        urls = []
        for picture in pictures:
            url = self.store.data_url(picture)
            if url is None:
                raise BadRequest(
                    f"The conversation has the picture {picture.sha256}, which was erased or never came here. Send it "
                    "again, or leave it out.",
                    code="picture_gone", param="messages",
                )  # fmt: skip
            urls.append(url)
        return tuple(urls)


def hashes_in(messages: Iterable[Message]) -> set[str]:
    """Return the hashes of the pictures that these messages show."""
    return {one.sha256 for message in messages for _, one in pictures_in(text_of(message)) if one is not None}
