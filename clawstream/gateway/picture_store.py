"""The pictures of conversations, each a file that is named after the SHA-256 of its bytes.

The log has marks that name them (a claim check: Hohpe and Woolf, Enterprise Integration Patterns). A picture that many
requests repeat is kept once. A file that is there is whole: it is written beside its place and renamed.
"""

import asyncio
import base64
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawstream.conversation.messages import Message, text_of
from clawstream.conversation.pictures import Picture, Sight, pictures_in
from clawstream.gateway.requests.fields import BadRequest
from clawstream.gateway.requests.pictures import ShownPicture, with_marks

_MEDIA = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp", b"GIF8": "image/gif"}


@dataclass(frozen=True, slots=True)
class PictureStore:
    """A folder of pictures; several processes may write and read it."""

    folder: Path

    def put(self, shown: Iterable[ShownPicture]) -> None:
        """Keep each picture; one that is kept already becomes as new as today."""
        for one in shown:
            path = self._path(one.picture.sha256)
            try:
                os.utime(path)
                continue
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
                file.write(one.data)
                file.flush()
                os.fsync(file.fileno())
            Path(file.name).rename(path)

    def data_url(self, picture: Picture) -> str | None:
        """Return the picture as a data: URL; None: it was erased, or is somewhere else."""
        try:
            data = self._path(picture.sha256).read_bytes()
        except FileNotFoundError:
            return None
        media = next((media for begin, media in _MEDIA.items() if data.startswith(begin)), "image/png")
        return f"data:{media};base64,{base64.b64encode(data).decode()}"

    def kept(self) -> Iterator[tuple[str, int, float]]:
        """Return the hash of each picture, its bytes, and when it was last sent, in seconds since 1970."""
        for path in sorted(self.folder.glob("??/" + "?" * 64)):
            found = path.stat()
            yield path.name, found.st_size, found.st_mtime

    def erase(self, sha256: str) -> bool:
        """Remove a picture; return whether it was there."""
        try:
            self._path(sha256).unlink()
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

    async def in_marks(self, body: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
        """Return the body with marks in place of its pictures, which the store has by then, if it is to keep them.

        Raises BadRequest.
        """
        return await asyncio.to_thread(self._in_marks, body, keep)

    def _in_marks(self, body: Mapping[str, Any], keep: bool) -> dict[str, Any]:
        marked, shown = with_marks(body, self.sight)
        self.store.put(shown if keep else ())
        return marked

    async def shown(self, messages: Sequence[Message]) -> tuple[str, ...]:
        """Return the pictures of a conversation as data: URLs, in their order. Raises BadRequest for a missing one."""
        found = [picture for message in messages for _, picture in pictures_in(text_of(message)) if picture is not None]
        return await asyncio.to_thread(self._urls, found) if found else ()

    def _urls(self, pictures: Sequence[Picture]) -> tuple[str, ...]:
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
