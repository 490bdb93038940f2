"""Control runs, in which what people say, or a part of it, does not reach the policy. Pure.

A control changes one thing and leaves the rest of the pipeline as it is. `coin` and `shuffled` change the
judge's answers, `frozen` the learning rate.
"""

import re
from enum import StrEnum
from typing import Protocol

from clawstream.simulation.opinions import HINT_MARK, drawn

_CASE = re.compile(r"<request>.*</next_state>", re.DOTALL)
_OPENING = re.compile(r"<request>\s*(.*?)\s*(?:\n\n\[assistant\]\n|</request>)", re.DOTALL)
_OPENING_CHARACTERS = 500  # well within the kept part of a request that is cut, so all turns of a session agree on it


class Control(StrEnum):
    """The change to a run that keeps it from learning from what people said (`coin`: from verdicts only)."""

    SHUFFLED = "shuffled"  # verdict and hint are those of another session's turn
    COIN = "coin"  # verdicts are drawn; hints stay
    FROZEN = "frozen"  # the learning rate is 0


class Replies(Protocol):
    """How a judge answers one vote."""

    def reply(self, system: str, prompt: str, vote_seed: int) -> str:
        """Return the text of the answer."""
        ...


class RandomJudge:
    """A judge with random scores, -1 as often as 1; its hints come from the judge behind it."""

    def __init__(self, judge: Replies, *, seed: int) -> None:
        self._judge, self._seed = judge, seed

    def reply(self, system: str, prompt: str, vote_seed: int) -> str:
        said = self._judge.reply(system, prompt, vote_seed)
        if HINT_MARK in system:
            return said
        score = 1 if drawn("coin", self._seed, vote_seed, system, prompt) < 0.5 else -1
        return f"Whatever the user said, the coin decides.\n\\boxed{{{score}}}"


class ShuffledJudge:
    """A judge that mixes up reactions: each turn is judged by the reaction to an earlier turn of another session.

    All votes on a turn, scores and hints, rest on the same other turn. Sessions that open with the same words can't be
    told apart, so they count as one. A turn before which no other session spoke gets no opinion.
    """

    def __init__(self, judge: Replies, *, seed: int) -> None:
        self._judge, self._seed = judge, seed
        self._cases: dict[str, str] = {}  # by a turn's sections: the opening of its session; in order of arrival
        self._instead: dict[str, str] = {}  # by a turn's sections: the sections that are judged in place of them

    def reply(self, system: str, prompt: str, vote_seed: int) -> str:
        found = _CASE.search(prompt)
        return self._judge.reply(system, "" if found is None else self.other_than(found[0]), vote_seed)

    def other_than(self, case: str) -> str:
        """Return the sections of the turn that stands in for `case`, always the same one; "" where there was none."""
        if case not in self._instead:
            opening = opening_of(case)
            others = [other for other, its_opening in self._cases.items() if its_opening != opening]
            number = int(drawn("shuffled", self._seed, case) * len(others))
            self._instead[case] = others[number] if others else ""
            self._cases[case] = opening
        return self._instead[case]


def controlled(judge: Replies, control: Control | None, *, seed: int) -> Replies:
    """Return the judge as it answers under `control`."""
    match control:
        case Control.COIN:
            return RandomJudge(judge, seed=seed)
        case Control.SHUFFLED:
            return ShuffledJudge(judge, seed=seed)
        case _:
            return judge


def opening_of(case: str) -> str:
    """Return how the session of a turn opens, the same for all turns of a session."""
    found = _OPENING.search(case)
    return "" if found is None else found[1][:_OPENING_CHARACTERS]
