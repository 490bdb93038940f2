"""Offers this policy's versions to engines on other machines: files over HTTP, read-only.

GET /versions/v000007/manifest.json, then each file that it names. Nothing else of the disk can be asked for. An
interrupted download goes on where it stopped (RFC 9110, 14: Range).
"""

import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from clawstream.config import WeightsSettings
from clawstream.errors import ConfigError
from clawstream.inference.http_borders import guard_origin
from clawstream.inference.model_folder import MANIFEST, files_of

log = logging.getLogger(__name__)


@asynccontextmanager
async def offering(settings: WeightsSettings, versions: Path) -> AsyncIterator[int | None]:
    """Serve the files for the length of the block, as `settings` say; yield the port, None where nothing is offered.

    Raises ConfigError where the port can't be had.
    """
    if settings.offer is None:
        yield None
        return
    host, _, asked = settings.offer.rpartition(":")
    key = None if settings.api_key is None else settings.api_key.get_secret_value()
    runner = web.AppRunner(_application(versions, key), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host.strip("[]"), int(asked))
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"weights.offer: {settings.offer} can't be listened on ({error}). "
                "Nothing is trained. Stop what uses it, or name another port"
            ) from error
        port = int(runner.addresses[0][1])
        log.info("versions_offered host=%s port=%d", host, port)
        yield port
    finally:
        await runner.cleanup()


def _application(versions: Path, key: str | None) -> web.Application:
    async def file(request: web.Request) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if key is not None and not hmac.compare_digest(shown, f"Bearer {key}".encode()):
            raise web.HTTPUnauthorized(text="the key is missing or another; set weights.api_key as the trainer has it")
        folder, name = versions / request.match_info["version"], request.match_info["name"]
        manifest = folder / MANIFEST
        if not manifest.is_file() or name not in {MANIFEST, *(file.name for file in files_of(manifest.read_bytes()))}:
            raise web.HTTPNotFound(text=f"{request.path}: this trainer does not have it, or not any more")
        return web.FileResponse(folder / name)

    app = web.Application(middlewares=[guard_origin])
    app.add_routes([web.get(r"/versions/{version:v\d{6,18}}/{name:.+}", file)])
    return app
