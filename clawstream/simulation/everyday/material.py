"""The requests and wishes that lie here as files.

Each file of requests is a split of its own: people ask from the first, settings are tuned on the second, and scores are
reported on the third.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import chain, zip_longest
from pathlib import Path

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


def requests_of(split: Split) -> tuple[str, ...]:
    """Return the requests of a split; the first few are of as many kinds."""
    kinds = requests_by_kind(split).values()
    return tuple(request for request in chain.from_iterable(zip_longest(*kinds)) if request is not None)


def requests_by_kind(split: Split) -> Mapping[str, tuple[str, ...]]:
    """Return the requests of a split, each below what kind it is of."""
    found = tomllib.loads((_FOLDER / f"{split}.toml").read_text())
    return {kind: tuple(requests) for kind, requests in found.items()}


def wishes() -> tuple[AnswerWish, ...]:
    """Return all wishes, in the order of their file."""
    return tuple(_wishes())


def _wishes() -> Iterator[AnswerWish]:
    for found in tomllib.loads((_FOLDER / "wishes.toml").read_text())["wish"]:
        words = {
            field.name: tuple(found[field.name]) for field in fields(AnswerWish) if field.name not in ("id", "wanted")
        }
        yield AnswerWish(id=found["id"], wanted=found["wanted"], **words)
