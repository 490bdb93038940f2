"""The client of a reward model: it gives an answer in a conversation a number. SGLang serves it, with `--is-embedding`.

SGLang renders the conversation by the model's chat template (POST /tokenize), and gives the number (POST /classify).
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from math import isfinite
from typing import Any

import aiohttp
import orjson

from clawstream.config import JudgeSettings
from clawstream.errors import ConfigError, TryLater
from clawstream.inference.http_borders import ASKING, PLAIN, parsed, read_body, read_error, shown
from clawstream.inference.judge_client import JudgeRefused, JudgeReply, failure, judge_name, judge_session

_MOST_BYTES = 8 * 2**20  # of a reply: token ids of a long conversation
_TRIAL = ({"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"})


class RewardModel:
    """One reward model at one endpoint."""

    def __init__(self, session: aiohttp.ClientSession, settings: JudgeSettings, url: str) -> None:
        self._session = session
        self._model = settings.model
        self.above = 0.0 if settings.reward_above is None else settings.reward_above
        self._root = url.rstrip("/").removesuffix("/v1")
        self.name = judge_name(settings.model, url)

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: JudgeSettings) -> AsyncIterator["RewardModel"]:
        """Yield a client that is open for the length of the block."""
        if settings.url is None:
            raise ConfigError(
                "judge.url is not set: name the reward model's endpoint, for example http://127.0.0.1:30002"
            )
        async with judge_session(settings, settings.call_timeout_s) as session:
            yield cls(session, settings, settings.url)

    async def rate(self, messages: Sequence[Mapping[str, str]]) -> JudgeReply:
        """Return the number that the model gives the last message, as text. Raises TryLater or JudgeRefused."""
        rendered = {"model": self._model, "messages": list(messages), "add_generation_prompt": False}
        ids = (await self._post("tokenize", rendered)).get("tokens")
        if not isinstance(ids, list) or not ids:
            raise JudgeRefused(
                f"judge {self.name}: {self._root}/tokenize gives no tokens; this vote is recorded as failed"
            )
        found = await self._post("classify", {"input_ids": ids})
        numbers = found.get("embedding")
        if not isinstance(numbers, list) or len(numbers) != 1 or not _is_number(numbers[0]):
            raise JudgeRefused(
                f"judge {self.name}: {self._root}/classify gives {shown(str(numbers)[:100])}, expected one number: is "
                "it a reward model, started with --is-embedding? This vote is recorded as failed"
            )
        return JudgeReply(text=f"{numbers[0]:.6g}", prompt_tokens=len(ids), completion_tokens=0)

    async def _post(self, what: str, body: Mapping[str, object]) -> Mapping[str, Any]:
        url = f"{self._root}/{what}"
        try:
            async with self._session.post(url, data=orjson.dumps(body), headers=PLAIN, **ASKING) as response:
                if response.status != 200:
                    raise failure(
                        self.name, response.status, await read_error(response), response.headers.get("Retry-After")
                    )
                content, wrong = await read_body(response, most_bytes=_MOST_BYTES)
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            raise TryLater(f"judge {self.name}: no reply ({shown(repr(error))}); it is asked again") from error
        found = None if wrong else parsed(content)
        if not isinstance(found, dict):
            raise JudgeRefused(f"judge {self.name}: {url} gives no JSON object; this vote is recorded as failed")
        return found


async def problem_with(settings: JudgeSettings, *, within_s: float = 10.0) -> str | None:
    """Return why the reward model gives no number, in words for a person; None: it gives one."""
    try:
        async with asyncio.timeout(within_s), RewardModel.open(settings) as model:
            await model.rate(_TRIAL)
    except TimeoutError:
        return f"{settings.url} gave no answer within {within_s:g} s. Is the model still loading?"
    except (TryLater, JudgeRefused) as error:
        return str(error)
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
