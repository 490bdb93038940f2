"""Everyday requests in English, the wishes of people who ask them, and what a policy should know whatever they say.

All of it lies here as files.

Each file of requests is a split of its own: people ask from the first, settings are tuned on the second, and scores are
reported on the third. People, judge and scorer share what is here and nothing else.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


class Split(StrEnum):
    """Who gets to see a request; the name of its file."""

    PEOPLE = "people"
    DEVELOPMENT = "development"
    REPORT = "report"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWish:
    """How a person wants answers to be, and the words for it: a judge's hints and the person's complaints."""

    id: str
    wanted: str
    hints: tuple[str, ...]
    hints_held_out: tuple[str, ...]
    says: tuple[str, ...]  # complaints that say what is wanted
    says_held_out: tuple[str, ...]
    rejects: tuple[str, ...]  # complaints that only reject what there was
    rejects_held_out: tuple[str, ...]

    @property
    def complaints(self) -> tuple[str, ...]:
        """All words for it that people say, those held out too."""
        return (*self.says, *self.says_held_out, *self.rejects, *self.rejects_held_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class EverydayPersona:
    """Somebody who asks everyday requests: the system message of their assistant, and the id of their wish."""

    name: str
    system: str
    wish: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralQuestion:
    """A fact or a sum; an answer is right if it has one of `answers`."""

    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralMaterial:
    """What nobody asks for in a run: a text, facts and sums."""

    text: str
    facts: tuple[GeneralQuestion, ...]
    sums: tuple[GeneralQuestion, ...]


def requests_of(split: Split) -> tuple[str, ...]:
    """Return the requests of a split; the first few are of as many kinds."""
    kinds = requests_by_kind(split).values()
    return tuple(request for request in chain.from_iterable(zip_longest(*kinds)) if request is not None)


def requests_by_kind(split: Split) -> Mapping[str, tuple[str, ...]]:
    """Return the requests of a split, each below what kind it is of."""
    found = _read(split)
    return {kind: tuple(requests) for kind, requests in found.items()}


def wishes() -> tuple[AnswerWish, ...]:
    """Return all wishes, in the order of their file."""
    return tuple(_wishes())


def personas() -> tuple[EverydayPersona, ...]:
    """Return who talks, in the order in which they do where one comes after the other."""
    return tuple(EverydayPersona(**found) for found in _read("personas")["persona"])


def wish_of(persona: EverydayPersona) -> AnswerWish:
    return next(wish for wish in wishes() if wish.id == persona.wish)


def general() -> GeneralMaterial:
    found = _read("general")

    def questions(kind: str) -> tuple[GeneralQuestion, ...]:
        return tuple(GeneralQuestion(question=one["question"], answers=tuple(one["answers"])) for one in found[kind])

    return GeneralMaterial(text=found["text"].strip(), facts=questions("facts"), sums=questions("sums"))


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text())


def _wishes() -> Iterator[AnswerWish]:
    for found in _read("wishes")["wish"]:
        words = {
            field.name: tuple(found[field.name]) for field in fields(AnswerWish) if field.name not in ("id", "wanted")
        }
        yield AnswerWish(id=found["id"], wanted=found["wanted"], **words)
