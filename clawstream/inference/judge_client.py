"""How a judge is asked: any OpenAI-compatible /chat/completions, over one pooled session.

The one rule: what arrived is a reply, however odd; what did not is TryLater, and asked again. Only a judge that will
never take this request has refused it.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from clawstream.config import JudgeSettings
from clawstream.errors import ClawstreamError, ConfigError, TryLater

_CONNECT_S = 10.0
_SHOWN_CHARACTERS = 300
_PASSING = (401, 403, 408, 425, 429)  # a bad key is an operator's to mend while the votes wait


class JudgeRefused(ClawstreamError):
    """The judge will not take this request, however often it is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """What arrived; counts are the endpoint's own, None where it gives none."""

    text: str
    prompt_tokens: int | None
    completion_tokens: int | None


class JudgeClient:
    """One judge at one endpoint."""

    def __init__(self, session: aiohttp.ClientSession, settings: JudgeSettings, url: str) -> None:
        self._session = session
        self._settings = settings
        self._url = f"{url.rstrip('/')}/chat/completions"
        self.name = judge_name(settings.model, url)

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: JudgeSettings) -> AsyncIterator["JudgeClient"]:
        """A client that lives as long as the block."""
        if settings.url is None:
            raise ConfigError(
                "judge.url is not set: name an OpenAI-compatible endpoint, for example http://127.0.0.1:8000/v1"
            )
        key = settings.api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}
        timeout = aiohttp.ClientTimeout(total=settings.call_timeout_s, sock_connect=_CONNECT_S)
        connector = aiohttp.TCPConnector(limit=settings.calls_at_once, keepalive_timeout=60.0)
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
            yield cls(session, settings, settings.url)

    async def ask(self, system: str, user: str, *, seed: int) -> JudgeReply:
        """Return the judge's reply. Raises TryLater where none arrived, JudgeRefused where none ever will."""
        body = {
            "model": self._settings.model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
            "temperature": self._settings.temperature,
            "max_tokens": self._settings.max_tokens,
            "seed": seed,
        }
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(self._url, data=orjson.dumps(body), headers=headers) as response:
                raw = await response.read()
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            raise TryLater(f"judge {self.name}: no reply ({error!r}); it is asked again") from error
        if response.status != 200:
            raise _failure(self.name, response.status, raw, response.headers.get("Retry-After"))
        return _reply(raw)


def judge_name(model: str, url: str) -> str:
    """Return how votes name a judge: its model and where it is, without what may be secret in an address."""
    parts = urlsplit(url)
    return f"{model}@{parts.hostname}" + (f":{parts.port}" if parts.port is not None else "")


def _failure(name: str, status: int, raw: bytes, retry_after: str | None) -> TryLater | JudgeRefused:
    said = raw[:_SHOWN_CHARACTERS].decode(errors="replace")
    if status in _PASSING or not 400 <= status < 500:
        return TryLater(f"judge {name}: status {status}, {said}; it is asked again", retry_after_s=_wait(retry_after))
    return JudgeRefused(f"judge {name}: status {status}, {said}; this vote is recorded as failed")


def _wait(retry_after: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for, given as a number or as a date."""
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        at = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def _reply(raw: bytes) -> JudgeReply:
    """Return the reply in a body; a body that is no chat completion is the reply itself, for a reader to refuse."""
    try:
        body = orjson.loads(raw)
        text = body["choices"][0]["message"]["content"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return JudgeReply(text=raw.decode(errors="replace"), prompt_tokens=None, completion_tokens=None)
    usage = body.get("usage")
    counts: Mapping[str, Any] = usage if isinstance(usage, dict) else {}
    return JudgeReply(
        text=text if isinstance(text, str) else "",
        prompt_tokens=_count(counts.get("prompt_tokens")),
        completion_tokens=_count(counts.get("completion_tokens")),
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
