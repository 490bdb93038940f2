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

from pydantic import SecretStr

from clawstream.config import JudgeSettings
from clawstream.errors import ClawstreamError, ConfigError, TryLater
from clawstream.inference.judge_client import JudgeClient, JudgeRefused
from clawstream.simulation.everyday import wishes
from clawstream.simulation.everyday.person import EverydayTask
from clawstream.simulation.marks import HeldOutQuestion, ScoredQuestion
from clawstream.simulation.opinions import HINTS, Wish
from clawstream.simulation.reactions import PersonTask

T = TypeVar("T")
_TRIES = 3  # replies, until one can be read
_KEY = "OPENAI_API_KEY"
_NAMED = re.compile(r"(.+?)@(https?://.+)")
_LISTED_WITHIN_S = 30.0
_AWAY_S = 120.0  # for this long a model may be away
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_DONE = re.compile(r"\W*\bDONE\b\W*")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_ASKERS: Mapping[str, str] = MappingProxyType(
    {
        "student": "You are a student, and have the assistant help you with your homework.",
        "teacher": "You are a teacher, and prepare lessons with the assistant.",
        "ta": "You are a teaching assistant, and mark exams with the assistant.",
    }
)
_WANTED: Mapping[str, str] = MappingProxyType(
    {name: HINTS[wish][0] for name, wish in (("student", Wish.PLAIN), ("teacher", Wish.HEADED), ("ta", Wish.VERDICT))}
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
        async with JudgeClient.open(settings_of(named)) as client:
            yield cls(client)

    async def react(
        self, task: PersonTask | EverydayTask, messages: Sequence[Mapping[str, str]], rng: random.Random
    ) -> Remark:
        """Return what the person of a task says of the last message, an answer. Raises RoleUnplayed and TryLater."""
        found = await self._said(person_prompt(task, messages), remark_in, seed=rng.getrandbits(31))
        if found is None:
            raise RoleUnplayed(
                f"{self._client.name} said nothing {_TRIES} times in a row, as a person who was answered"
            )
        return found

    async def grade(self, question: ScoredQuestion, answer: str, *, seed: int) -> float | None:
        """Return a grade from 0 to 1; None: no reply has one. Raises RoleUnplayed and TryLater."""
        return await self._said(grade_prompt(question, answer), grade_in, seed=seed)

    async def _said(self, asked: tuple[str, str], read: Callable[[str], T | None], *, seed: int) -> T | None:
        """Return what the first reply that can be read says; None: none can be."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _AWAY_S
        tries = 0
        while tries < _TRIES:
            try:
                reply = await self._client.ask(*asked, seed=(seed + tries) % 2**31)
            except JudgeRefused as error:
                raise RoleUnplayed(f"{self._client.name} refused what it was asked: {error}") from error
            except TryLater as away:
                if loop.time() >= until_s:
                    raise
                await asyncio.sleep(away.retry_after_s or 1.0)
                continue
            tries += 1
            if reply.unusable is None and (found := read(reply.text)) is not None:
                return found
        return None


def _named(role: str, at: str | None) -> str | None:
    from openai import OpenAI, OpenAIError  # which takes more than a second to import

    if at is None or _NAMED.fullmatch(at):
        return at
    try:
        with OpenAI(base_url=at, api_key=os.environ.get(_KEY, "none"), timeout=_LISTED_WITHIN_S) as client:
            return f"{next(iter(client.models.list())).id}@{at}"
    except (OpenAIError, StopIteration) as error:
        raise ConfigError(
            f"--{role} {at}: no model is found there ({error!r}), expected an address with the OpenAI API that ends in "
            "/v1. Nothing was run. Correct it, or name MODEL@URL"
        ) from error


def settings_of(named: str) -> JudgeSettings:
    """Return how to ask the model of `MODEL@URL`; raises ValueError for any other text."""
    found = _NAMED.fullmatch(named)
    if found is None:
        raise ValueError(f"{named!r} names no language model, expected MODEL@URL, the URL ending in /v1")
    key = os.environ.get(_KEY)
    return JudgeSettings(url=found[2], model=found[1], api_key=SecretStr(key) if key else None)


def person_prompt(task: PersonTask | EverydayTask, messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Return what a model is told and asked that plays the person of a task; the last message is an answer."""
    who = _ASKERS[task.persona] if isinstance(task, PersonTask) else f"The assistant was told: {task.system}"
    names = {"user": "You", "assistant": "The assistant"}
    said = (f"{names[one['role']]}:\n{one['content']}" for one in messages if one["role"] in names)
    told = (
        f"You play a person who talks with an assistant, and are never the assistant. {who} You want its answers to be "
        f'like this: "{_WANTED[task.wish]}" You can\'t work out any of it yourself, and write casually.\n'
        "You see the conversation so far. Write the message that this person sends next, in one or two sentences and "
        "nothing else. If the last answer is as you want it, say so and end with the word DONE. If not, say in your "
        "own words what you would rather have."
    )
    return told, "\n\n".join((*said, "You:"))


def remark_in(reply: str) -> Remark | None:
    """Return what a model that plays a person says; None: nothing."""
    said = _aloud(reply)
    text, is_last = _DONE.sub(" ", said).strip(), _DONE.search(said) is not None
    return Remark(text=text or "Thanks, that's it.", is_last=is_last) if text or is_last else None


def grade_prompt(question: ScoredQuestion, answer: str) -> tuple[str, str]:
    """Return what a model is told and asked that grades an answer."""
    result = f"\nThe right result is {question.answer}." if isinstance(question, HeldOutQuestion) else ""
    asked = question.messages(hinted=False)[-1]["content"]
    told = (
        "You grade an assistant's answer for the person who asked. What counts is whether it answers the request "
        "rightly and is as this person wants answers to be. Give a grade from 0 (neither) to 1 (both, fully). Reply "
        "with the grade in a box, as \\boxed{0.5}, and nothing else."
    )
    wanted = f'The person wants: "{question.hint}"'
    return told, f"{wanted}\n\n<request>\n{asked}\n</request>{result}\n\n<answer>\n{answer}\n</answer>\n\nThe grade:"


def grade_in(reply: str) -> float | None:
    """Return the grade that a reply gives, in its last box or as its only number; None: none from 0 to 1."""
    said = _aloud(reply)
    boxes, numbers = _BOXED.findall(said), _NUMBER.findall(said)
    found = boxes[-1].strip() if boxes else numbers[0] if len(numbers) == 1 else ""
    return float(found) if _NUMBER.fullmatch(found) and float(found) <= 1 else None


def _aloud(reply: str) -> str:
    """Return what a model says, without its thinking."""
    return _THOUGHT.sub("", reply).strip()
