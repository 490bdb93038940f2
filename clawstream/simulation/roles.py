"""Language models, at any address with the OpenAI API, that play the simulation's people or grade answers.

Questions keep the wordings of their files: a model that repeats a problem may change its numbers. A reply that does not
say what was asked for is read as None, which is no grade of 0 and no reaction.
"""

import asyncio
import os
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import SecretStr, ValidationError

from clawstream.config import JudgeSettings
from clawstream.errors import ClawstreamError, ConfigError, TryLater
from clawstream.inference.judge_client import JudgeClient, JudgeRefused
from clawstream.simulation.everyday import wishes

T = TypeVar("T")
_TRIES = 3  # replies, until one can be read
_KEY = "OPENAI_API_KEY"
_NAMED = re.compile(r"(.+?)@(https?://.+)")
_TRIED_WITHIN_S = 30.0
_CALL_S = 110.0  # for a reply: less than people may pause
_AWAY_S = 60.0  # for this long, since its first failure, a model may be away
_MOST_TOKENS = 2048  # of a reply, its thinking included
_DONE = re.compile(r"\W*\bDONE\W*\Z")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"\d*\.?\d+")
_ASKERS: Mapping[str, str] = MappingProxyType(
    {
        "student": "You are a student, and have the assistant help you with your homework.",
        "teacher": "You are a teacher, and prepare lessons with the assistant.",
        "ta": "You are a teaching assistant, and mark exams with the assistant.",
    }
)
_WANTED: Mapping[str, str] = MappingProxyType(
    {
        "student": "plain, casual words without headings or bold, every step kept, and the result last",
        "teacher": "under headings, with the problem by name, all details and a friendly word",
        "ta": "the verdict first, and then each step that leads to it",
    }
    | {wish.id: wish.wanted for wish in wishes()}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Which language model plays whom, as MODEL@URL; None: code plays them."""

    people: str | None = None
    judge: str | None = None
    scorer: str | None = None

    def named(self) -> "Roles":
        """Return the roles with a model each; where only an address is given, the first that it serves.

        Raises ConfigError where none is found.
        """
        return Roles(**{field.name: _named(field.name, getattr(self, field.name)) for field in fields(self)})


BY_CODE = Roles()


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """What a person says of an answer."""

    text: str
    is_last: bool  # the person is content, and says nothing of the next answer


class RoleUnplayed(ClawstreamError):
    """A language model will not play its part; the message says why."""


class RolePlayer:
    """One language model that plays a part."""

    def __init__(self, client: JudgeClient) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def open(cls, named: str) -> AsyncIterator["RolePlayer"]:
        """Yield the model of `MODEL@URL`; it is shown the key in OPENAI_API_KEY, if there is one."""
        async with JudgeClient.open(settings_of(named), call_timeout_s=_CALL_S) as client:
            yield cls(client)

    async def react(self, asked: tuple[str, str], rng: random.Random) -> Remark:
        """Return what the person of a `person_prompt` says of the last answer. Raises RoleUnplayed."""
        found = await self._said(asked, remark_in, seed=rng.getrandbits(31))
        if found is None:
            raise RoleUnplayed(
                f"{self._client.name} said nothing {_TRIES} times in a row, as a person who was answered, or did not "
                f"end its thinking within {_MOST_TOKENS:,} tokens"
            )
        return found

    async def grade(self, asked: tuple[str, str], *, seed: int) -> float | None:
        """Return the grade, 0 to 1, of a `grade_prompt`; None: no reply has one. Raises RoleUnplayed."""
        return await self._said(asked, grade_in, seed=seed)

    async def _said(self, asked: tuple[str, str], read: Callable[[str], T | None], *, seed: int) -> T | None:
        """Return what the first reply that can be read says; None: none can be."""
        loop = asyncio.get_running_loop()
        failed_at_s: float | None = None
        tries = 0
        while tries < _TRIES:
            try:
                reply = await self._client.ask(*asked, seed=(seed + tries) % 2**31)
            except JudgeRefused as error:
                raise RoleUnplayed(f"{self._client.name} refuses what it is asked: {error}") from error
            except TryLater as away:
                wait_s, now_s = away.retry_after_s or 1.0, loop.time()
                failed_at_s = now_s if failed_at_s is None else failed_at_s
                if now_s + wait_s > failed_at_s + _AWAY_S:
                    raise RoleUnplayed(f"{self._client.name} gave no answer for {_AWAY_S:g} s: {away}") from away
                await asyncio.sleep(wait_s)
                continue
            tries, failed_at_s = tries + 1, None
            if reply.unusable is None and (found := read(reply.text)) is not None:
                return found
        return None


def _named(role: str, at: str | None) -> str | None:
    from openai import OpenAI, OpenAIError  # which takes more than a second to import

    if at is None:
        return None
    found = _NAMED.fullmatch(at)
    try:
        url = settings_of(at if found else f"any@{at}").url
        assert url is not None
        _port = urlsplit(url).port
    except ValueError as error:
        raise ConfigError(f"--{role}: {error}. Nothing was run") from error
    try:
        with OpenAI(base_url=url, api_key=os.environ.get(_KEY, "none"), timeout=_TRIED_WITHIN_S) as client:
            model = found[1] if found else next(iter(client.models.list())).id
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=1)
    except (OpenAIError, StopIteration, AttributeError, TypeError) as error:  # the last two: no JSON, or another one
        raise ConfigError(
            f"--{role} {at}: no model answers there ({error!r}), expected an address with the OpenAI API that ends in "
            f"/v1, and a key for it in {_KEY} if it asks for one. Nothing was run. Correct it, or name MODEL@URL"
        ) from error
    return f"{model}@{url}"


def settings_of(named: str) -> JudgeSettings:
    """Return how to ask the model of `MODEL@URL`; raises ValueError for any other text, and for what may be secret."""
    found = _NAMED.fullmatch(named)
    if found is None:
        raise ValueError("it names no language model, expected MODEL@URL, or the URL alone, which ends in /v1")
    key = os.environ.get(_KEY)
    try:
        return JudgeSettings(
            url=found[2], model=found[1], api_key=SecretStr(key) if key else None, max_tokens=_MOST_TOKENS
        )
    except ValidationError as error:
        raise ValueError("; ".join(str(one["msg"]) for one in error.errors(include_input=False))) from None


def person_prompt(
    persona: str, wish: str, system: str | None, messages: Sequence[Mapping[str, str]]
) -> tuple[str, str]:
    """Return what a model is told and asked that plays a person with a wish; the last message is an answer.

    `system` is what the person's assistant was told; None: nothing.
    """
    who = _ASKERS[persona] if system is None else f"The assistant was told: {system}"
    names = {"user": "You", "assistant": "The assistant"}
    said = (f"{names[one['role']]}:\n{one['content']}" for one in messages if one["role"] in names)
    told = (
        f"You play a person who talks with an assistant, and are never the assistant. {who} You want its answers to be "
        f'like this: "{_WANTED[wish]}" You can\'t work out any of it yourself, and write casually.\n'
        "You see the conversation so far. Write the message that this person sends next, in one or two sentences and "
        "nothing else. If the last answer is as you want it, say so and end with the word DONE. If not, say in your "
        "own words what you would rather have."
    )
    return told, "\n\n".join((*said, "You:"))


def remark_in(reply: str) -> Remark | None:
    """Return what a model that plays a person says; None: nothing."""
    said = _aloud(reply)
    text, is_last = _DONE.sub("", said), _DONE.search(said) is not None
    return Remark(text=text or "Thanks, that's it.", is_last=is_last) if text or is_last else None


def grade_prompt(asked: str, answer: str, *, wanted: str, result: str | None) -> tuple[str, str]:
    """Return what a model is told and asked that grades an answer; `result` is the right one, None: there is none."""
    right = "" if result is None else f"\nThe right result is {result}."
    told = (
        "You grade an assistant's answer for the person who asked. What counts is whether it answers the request "
        "rightly and is as this person wants answers to be. Give a grade from 0 (neither) to 1 (both, fully). Reply "
        "with the grade in a box, as \\boxed{0.5}, and nothing else."
    )
    request = f'The person wants: "{wanted}"\n\n<request>\n{asked}\n</request>{right}'
    return told, f"{request}\n\n<answer>\n{answer}\n</answer>\n\nThe grade:"


def grade_in(reply: str) -> float | None:
    """Return the grade that a reply gives, in its last box or as a number that is all of it; None: none from 0 to 1."""
    said = _aloud(reply)
    boxes = _BOXED.findall(said)
    found = boxes[-1].strip() if boxes else said.rstrip(".")
    return float(found) if _NUMBER.fullmatch(found) and float(found) <= 1 else None


def _aloud(reply: str) -> str:
    """Return what a model says after its thinking, which a chat template may have opened; "" where that never ended."""
    _, thought, said = reply.rpartition("</think>")
    return "" if not thought and "<think>" in said else said.strip()
