"""The engine clients of a process: one pool of connections, and for each address a client of the server's dialect."""

import aiohttp

from clawstream.config import EngineSettings, TeacherSettings
from clawstream.inference.http_borders import bearer
from clawstream.inference.http_engine import HttpEngine
from clawstream.inference.sglang import SglangEngine
from clawstream.inference.vllm import VllmEngine

_CLIENTS: dict[str, type[HttpEngine]] = {"sglang": SglangEngine, "vllm": VllmEngine}


def engine_session(settings: EngineSettings | TeacherSettings) -> aiohttp.ClientSession:
    """Return a process's pool of connections to engines: as many as there are requests; each shows the engines' key.

    SGLang closes a connection that was idle for 5 s; the pool closes it sooner, so that no request is lost on it.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
    headers, no_cookies = bearer(settings.api_key), aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(connector=connector, headers=headers, cookie_jar=no_cookies)


def engine_client(settings: EngineSettings) -> type[HttpEngine]:
    """Return the client that speaks the dialect of the engines."""
    return _CLIENTS[settings.dialect]
