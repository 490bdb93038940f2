"""A test vote: one small request to a judge, before any turn is put to it."""

import asyncio
from typing import Any

import aiohttp
import orjson

from clawstream.config import JudgeSettings
from clawstream.inference.judges.judge_client import TEMPERATURE

TRIAL_S = 10.0
_MOST_BYTES = 2**18
_SHOWN_CHARACTERS = 200


async def problem_with(settings: JudgeSettings, url: str, *, within_s: float = TRIAL_S) -> str | None:
    """Return in words why the judge at `url` gives no vote, and what to do; None: it does."""
    body = {
        "model": settings.model,
        "messages": [{"role": "user", "content": "Reply with \\boxed{1}."}],
        "temperature": TEMPERATURE,
        "max_tokens": 16,
    }
    headers = {"Content-Type": "application/json"}
    if settings.api_key is not None:
        headers["Authorization"] = f"Bearer {settings.api_key.get_secret_value()}"
    where = f"{url.rstrip('/')}/chat/completions"
    try:
        async with (
            asyncio.timeout(within_s),
            aiohttp.ClientSession() as session,
            session.post(where, data=orjson.dumps(body), headers=headers, allow_redirects=False) as response,
        ):
            raw = await _beginning(response)
    except TimeoutError:
        return f"{where} gave no answer within {within_s:g} s. Is the model still loading?"
    except (aiohttp.ClientError, ConnectionError) as error:
        return f"nothing answers at {where} ({error}). Start the judge there, or set judge.url"
    if response.status != 200:
        return f"{where} answers with status {response.status}{_said(raw)}. {_advice(settings, response.status)}"
    if not _is_completion(raw):
        return f"what {where} answers is no chat completion{_said(raw)}. Is judge.url the address that ends in /v1?"
    return None


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """Return the body as far as it is read, which is more than any reply to so small a request has."""
    raw = b""
    while len(raw) < _MOST_BYTES and (piece := await response.content.readany()):
        raw += piece
    return raw[:_MOST_BYTES]


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
    try:
        message: Any = orjson.loads(raw)["choices"][0]["message"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return False
    return isinstance(message, dict)
