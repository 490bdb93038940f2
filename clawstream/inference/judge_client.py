"""How a judge is asked: any OpenAI-compatible /chat/completions, over one pooled session.

Whatever arrived is a reply, however odd; a missing reply is TryLater, and asked for again. JudgeRefused is for a judge
that will never take this request. A reply past its limit of bytes or time counts as an unusable reply.
"""

import asyncio
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
from clawstream.inference.http_borders import ASKING, PLAIN, bearer, parsed, read_body, read_error, shown

CALLS_AT_ONCE = 64  # to the endpoint, by each judging process; servers queue what is more
CALL_TIMEOUT_S = 60.0  # for one vote of 1,024 tokens; then it is asked for again until DEADLINE_S
DEADLINE_S = 600.0  # then a vote that did not arrive is recorded as failed; a server that restarts is back sooner
TEMPERATURE = 0.6  # votes of one case differ, and few are unreadable
_CONNECT_S = 10.0
_LONGEST_WAIT_S = 3600.0  # that a judge may ask for
_SHARE_OF_TIME = 0.9  # of a call's time; a reply that has begun by then is taken as it is
_FRAME_BYTES, _TOKEN_BYTES = 64 * 2**10, 64  # a token has up to 12 characters, thought and said, escaped
_MOST_BYTES = 2 * 2**20  # a vote is one record, and a byte that is no UTF-8 is recorded as three
_KEPT_CHARACTERS = 2000  # kept of an unusable reply
_MOST_TOKENS = 2**31 - 1
_PASSING = (401, 403, 408, 425, 429)  # a bad key is an operator's to mend while the votes wait


class JudgeRefused(ClawstreamError):
    """The judge will not take this request, however often it is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """A judge's reply; counts are the endpoint's own, None where it gives none.

    `unusable` says why the text is no whole reply.
    """

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    unusable: str | None = None


class JudgeClient:
    """One judge at one endpoint."""

    def __init__(
        self, session: aiohttp.ClientSession, settings: JudgeSettings, url: str, call_timeout_s: float
    ) -> None:
        self._session = session
        self._settings = settings
        self._call_timeout_s = call_timeout_s
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._most_bytes = min(_MOST_BYTES, _FRAME_BYTES + _TOKEN_BYTES * settings.max_tokens)
        self.name = judge_name(settings.model, url)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: JudgeSettings, *, call_timeout_s: float = CALL_TIMEOUT_S
    ) -> AsyncIterator["JudgeClient"]:
        """A client that lives as long as the block."""
        if settings.url is None:
            raise ConfigError(
                "judge.url is not set: name an OpenAI-compatible endpoint, for example http://127.0.0.1:8000/v1"
            )
        timeout = aiohttp.ClientTimeout(total=call_timeout_s, sock_connect=_CONNECT_S)
        connector = aiohttp.TCPConnector(limit=CALLS_AT_ONCE, keepalive_timeout=60.0)
        async with aiohttp.ClientSession(
            connector=connector, headers=bearer(settings.api_key), timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            yield cls(session, settings, settings.url, call_timeout_s)

    async def ask(self, system: str, user: str, *, seed: int) -> JudgeReply:
        """Return the judge's reply. Raises TryLater where none arrived, JudgeRefused where none ever will."""
        asked = {"system": system, "user": user}
        body = _body(self._settings, asked, max_tokens=self._settings.max_tokens) | {"seed": seed}
        until = asyncio.get_running_loop().time() + _SHARE_OF_TIME * self._call_timeout_s
        try:
            async with self._session.post(self._url, data=orjson.dumps(body), headers=PLAIN, **ASKING) as response:
                if response.status != 200:
                    said = await read_error(response, until=until)
                    raise _failure(self.name, response.status, said, response.headers.get("Retry-After"))
                content, wrong = await read_body(response, most_bytes=self._most_bytes, until=until)
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            raise TryLater(f"judge {self.name}: no reply ({shown(repr(error))}); it is asked again") from error
        if wrong is None:
            return _reply(content)
        return JudgeReply(
            text=content.decode(errors="replace")[:_KEPT_CHARACTERS],
            unusable=f"judge {self.name}: its reply is not read, {wrong}; its beginning is kept",
        )


def _body(settings: JudgeSettings, said: Mapping[str, str], *, max_tokens: int) -> dict[str, object]:
    messages = [{"role": role, "content": content} for role, content in said.items()]
    return {"model": settings.model, "messages": messages, "temperature": TEMPERATURE, "max_tokens": max_tokens}


def judge_name(model: str, url: str) -> str:
    """Return how the log names a judge or a teacher: its model and host, without what may be secret in an address."""
    parts = urlsplit(url)
    return f"{model}@{parts.hostname}" + (f":{parts.port}" if parts.port is not None else "")


def _failure(name: str, status: int, raw: bytes, retry_after: str | None) -> TryLater | JudgeRefused:
    said = shown(raw.decode(errors="replace"))
    if status in _PASSING or not 400 <= status < 500:
        return TryLater(f"judge {name}: status {status}, {said}; it is asked again", retry_after_s=_wait(retry_after))
    return JudgeRefused(f"judge {name}: status {status}, {said}; this vote is recorded as failed")


def _wait(retry_after: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for, as a number or a date, up to an hour."""
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return min(_LONGEST_WAIT_S, float(retry_after))
    try:
        at = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    wait_s = (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(_LONGEST_WAIT_S, max(0.0, wait_s))


def _reply(raw: bytes) -> JudgeReply:
    """Return the reply in a body; a body that is no chat completion is the reply itself, for a reader to refuse."""
    body: Any = parsed(raw)
    try:
        text = body["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return JudgeReply(text=raw.decode(errors="replace"))
    usage = body.get("usage")
    counts: Mapping[str, Any] = usage if isinstance(usage, dict) else {}
    return JudgeReply(
        text=text if isinstance(text, str) else "",
        prompt_tokens=_count(counts.get("prompt_tokens")),
        completion_tokens=_count(counts.get("completion_tokens")),
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None


_MOST_TRIAL_BYTES = 2**18
_SHOWN_CHARACTERS = 200


async def problem_with(settings: JudgeSettings, url: str, *, within_s: float = 10.0) -> str | None:
    """Return in words why the judge at `url` gives no vote, and what to do; None: it does."""
    body = _body(settings, {"user": "Reply with \\boxed{1}."}, max_tokens=16)
    where = f"{url.rstrip('/')}/chat/completions"
    try:
        async with (
            asyncio.timeout(within_s),
            aiohttp.ClientSession(headers=bearer(settings.api_key)) as session,
            session.post(where, data=orjson.dumps(body), headers=PLAIN, **ASKING) as response,
        ):
            raw = (await read_body(response, most_bytes=_MOST_TRIAL_BYTES)).content
    except TimeoutError:
        return f"{where} gave no answer within {within_s:g} s. Is the model still loading?"
    except (aiohttp.ClientError, ConnectionError) as error:
        return f"nothing answers at {where} ({error}). Start the judge there, or set judge.url"
    if response.status != 200:
        return f"{where} answers with status {response.status}{_said(raw)}. {_advice(settings, response.status)}"
    if not _is_completion(raw):
        return f"what {where} answers is no chat completion{_said(raw)}. Is judge.url the address that ends in /v1?"
    return None


def _advice(settings: JudgeSettings, status: int) -> str:
    if status in (401, 403):
        return "Set judge.api_key to a key that it takes" if settings.api_key is None else "Is judge.api_key right?"
    if status == 404:
        return f"Has it a model {settings.model} (judge.model), and is judge.url the address that ends in /v1?"
    return "Its own log says why"


def _said(raw: bytes) -> str:
    said = " ".join(raw[:_SHOWN_CHARACTERS].decode(errors="replace").split())
    return f" ({said})" if said.isprintable() and said else ""


def _is_completion(raw: bytes) -> bool:
    body: Any = parsed(raw)
    try:
        return isinstance(body["choices"][0]["message"], dict)
    except (KeyError, IndexError, TypeError):
        return False
