"""Fetches versions from a trainer on another machine, and shows an engine only the bytes that were published.

Each file is checked against the manifest, and the manifest against the log. Only then the folder gets its final name,
which has the manifest's hash in it. Bytes that arrived before a connection broke are not fetched again.
"""

import asyncio
import hashlib
import logging
import re
import shutil
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp

from clawstream.config import WeightsSettings
from clawstream.errors import ConfigError, TryLater
from clawstream.events import PolicyPublished
from clawstream.inference.http_borders import bearer
from clawstream.inference.model_folder import (
    MANIFEST,
    File,
    files_of,
    put_whole,
    remove_whole,
    sha256_of_file,
    version_name,
)
from clawstream.locks import locked

log = logging.getLogger(__name__)

SILENCE_S = 60.0  # if the trainer sends nothing for so long, it is asked again
MANIFEST_BYTES = 16 * 2**20
_PIECE_BYTES = 2**20
_OURS = re.compile(r"(\.fetching-|\.removing-)?v\d{6,}-[0-9a-f]{12}")


class Fetcher:
    """The versions of one policy on this machine, fetched from its trainer's machine."""

    def __init__(self, session: aiohttp.ClientSession, url: str, folder: Path, base: Path) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._folder = folder
        self._base = base

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: WeightsSettings, folder: Path, base: Path | None) -> AsyncIterator["Fetcher | None"]:
        """Yield a fetcher for the length of the block; None where versions lie on this machine already.

        `folder` is for the fetched versions; `base` is the base policy's folder on this machine. Raises ConfigError
        without a base, PartUnavailable where another process fetches into the folder.
        """
        if settings.url is None:
            yield None
            return
        if base is None:
            raise ConfigError(
                "weights.url is set and engine.model_path is not: version 0 is the base policy, which is not fetched. "
                "Name its folder on this machine"
            )
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        headers = bearer(settings.api_key)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        with locked(folder / ".lock", within_s=0):
            async with aiohttp.ClientSession(headers=headers, timeout=timeout, auto_decompress=False) as session:
                yield cls(session, settings.url, folder, base)

    def here(self, version: PolicyPublished) -> PolicyPublished | None:
        """Return the version with its path on this machine; None: it has to be fetched first."""
        if version.manifest_sha256 is None:
            return replace(version, path=str(self._base.absolute()))
        place = self._folder / _name(version)
        return replace(version, path=str(place.absolute())) if place.is_dir() else None

    async def bring(self, version: PolicyPublished) -> None:
        """Fetch the whole version to this machine. Raises TryLater where that can't be done now."""
        if self.here(version) is not None:
            return
        fetching = self._folder / f".fetching-{_name(version)}"
        try:
            await asyncio.to_thread(fetching.mkdir, parents=True, exist_ok=True)
            manifest, files = await self._manifest(version)
            for file in files:
                await self._bring_file(version, file, fetching / file.name)
            await asyncio.to_thread(_put, fetching, manifest, self._folder / _name(version))
        except OSError as error:
            raise TryLater(
                f"version {version.policy_version} can't be written to {self._folder}: {error}. What is served stays"
            ) from error
        num_bytes = sum(file.num_bytes for file in files)
        log.info("version_fetched version=%d from=%s bytes=%d", version.policy_version, self._url, num_bytes)

    def make_room(self, keep: Collection[PolicyPublished]) -> None:
        """Remove all fetched versions except those in `keep`. Raises TryLater where that can't be done."""
        kept = {_name(version) for version in keep if version.manifest_sha256 is not None}
        try:
            for path in self._folder.iterdir():
                if _OURS.fullmatch(path.name) and path.name.removeprefix(".fetching-") not in kept:
                    (shutil.rmtree if path.name.startswith(".") else remove_whole)(path)
        except OSError as error:
            raise TryLater(f"{self._folder}: old versions can't be removed: {error}") from error

    async def _manifest(self, version: PolicyPublished) -> tuple[bytes, list[File]]:
        raw = b"".join([piece async for piece in self._read(version, MANIFEST, 0, MANIFEST_BYTES)])
        found = hashlib.sha256(raw).hexdigest()
        if found != version.manifest_sha256:
            raise TryLater(
                f"{self._url}: the manifest of version {version.policy_version} has sha256 {found[:12]}, and the log "
                f"says {(version.manifest_sha256 or '')[:12]}. Is weights.url another policy's trainer?"
            )
        try:
            return raw, [file for file in files_of(raw) if file.is_for_engines]
        except ValueError as error:
            raise TryLater(f"{self._url}: version {version.policy_version}: {error}. It is not loaded") from error

    async def _bring_file(self, version: PolicyPublished, file: File, path: Path) -> None:
        begun = await asyncio.to_thread(_num_begun_bytes, path)
        if begun < file.num_bytes:
            with await asyncio.to_thread(path.open, "ab") as out:
                async for piece in self._read(version, file.name, begun, file.num_bytes - begun):
                    await asyncio.to_thread(out.write, piece)
        wrong = await asyncio.to_thread(_wrong, path, file)
        if wrong is not None:
            raise TryLater(f"{self._url}: version {version.policy_version}: {wrong}. It is asked for again")

    async def _read(self, version: PolicyPublished, name: str, begin: int, at_most: int) -> AsyncIterator[bytes]:
        url = f"{self._url}/versions/{version_name(version.policy_version)}/{name}"
        num_bytes = 0
        try:
            headers = {"Range": f"bytes={begin}-"} if begin else {}
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                if response.status != (206 if begin else 200):
                    words = (await response.content.read(200)).decode("utf-8", "replace")
                    raise TryLater(f"{url}: {response.status} {words}. What is served stays")
                async for piece in response.content.iter_chunked(_PIECE_BYTES):
                    num_bytes += len(piece)
                    if num_bytes > at_most:
                        raise TryLater(f"{url}: more than the {at_most} bytes that are expected. What is served stays")
                    yield piece
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TryLater(f"{url}: {type(error).__name__}: {error}. What is served stays") from error


def _name(version: PolicyPublished) -> str:
    return f"{version_name(version.policy_version)}-{(version.manifest_sha256 or '')[:12]}"


def _put(fetching: Path, manifest: bytes, place: Path) -> None:
    (fetching / MANIFEST).write_bytes(manifest)
    put_whole(fetching, place)


def _num_begun_bytes(path: Path) -> int:
    """Return how many bytes of the file are here; where there is no file yet, make an empty one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path.stat().st_size


def _wrong(path: Path, file: File) -> str | None:
    """Return what is wrong with a fetched file; None: nothing. A file that can't be resumed is removed."""
    found, size = sha256_of_file(path), path.stat().st_size
    if found == file.sha256:
        return None
    if size >= file.num_bytes:
        path.unlink()
    return f"{file.name}: found {size} bytes, sha256 {found[:12]}, expected {file.num_bytes}, {file.sha256[:12]}"
