"""Compares a replay's verdicts with the live ones, and two versions' answers by what a person prefers, blind. Pure.

A turn to which one side gave no score is counted apart, never as a 0.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import comb
from statistics import fmean

from clawstream.events import Event, VerdictReached, VoteCast, VoteStatus

SCORES = (-1, 0, 1)


class Choice(StrEnum):
    """What a person says of a pair."""

    BEFORE = "before"
    AFTER = "after"
    EQUAL = "equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A request and two answers; which one is shown first is random."""

    turn_id: str
    request: str
    before: str
    after: str
    after_first: bool

    @property
    def shown(self) -> tuple[str, str]:
        """The answers in the order in which they are shown."""
        return (self.after, self.before) if self.after_first else (self.before, self.after)

    @property
    def is_same(self) -> bool:
        """Whether both answers are the same, so that there is nothing to choose."""
        return self.before == self.after

    def choice(self, letter: str) -> Choice:
        """Return the choice that `letter` means: "a" is the answer shown first, "b" the other, "=" neither."""
        if letter == "=":
            return Choice.EQUAL
        return Choice.AFTER if (letter == "a") == self.after_first else Choice.BEFORE


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrelatedTask:
    """A question that has nothing to do with what people said, and a pattern that a right answer has in it."""

    question: str
    pattern: str  # a regular expression; upper and lower case are the same

    def accepts(self, answer: str) -> bool:
        """Return whether the answer is right."""
        return re.search(self.pattern, answer, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceCounts:
    """How often each version's answer was preferred."""

    after: int = 0
    before: int = 0
    equal: int = 0

    @property
    def decided(self) -> int:
        """The number of pairs in which one answer was preferred."""
        return self.after + self.before

    @property
    def chance(self) -> float | None:
        """The chance of a result this uneven if both were equally good (two-sided sign test); None: no choice."""
        if self.decided == 0:
            return None
        fewer = min(self.after, self.before)
        tail = sum(comb(self.decided, k) for k in range(fewer + 1)) / 2.0**self.decided
        return min(1.0, 2 * tail)


def tally(choices: Iterable[Choice]) -> PreferenceCounts:
    """Return how often each choice was made."""
    return PreferenceCounts(**{choice.value: count for choice, count in Counter(choices).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What votes cost. Tokens count only where the judge's endpoint reported them."""

    num_calls: int
    num_failed: int
    prompt_tokens: int
    completion_tokens: int
    num_uncounted: int  # calls whose tokens were not reported

    @classmethod
    def of(cls, votes: Iterable[VoteCast]) -> "Cost":
        """Return the sum over the votes; of two votes with one id the first counts."""
        first = {vote.event_id: vote for vote in reversed(list(votes))}.values()
        return cls(
            num_calls=len(first),
            num_failed=sum(vote.status is VoteStatus.FAILED for vote in first),
            prompt_tokens=sum(vote.prompt_tokens or 0 for vote in first),
            completion_tokens=sum(vote.completion_tokens or 0 for vote in first),
            num_uncounted=sum(vote.prompt_tokens is None or vote.completion_tokens is None for vote in first),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTurn:
    """A turn as both sides judged it."""

    session_id: str
    turn_id: str
    revision: int
    live_status: str | None  # None: there is no verdict
    live_score: int | None  # None: there is no verdict, or one without a score
    replay_status: str | None
    replay_score: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All turns that either side judged, in the order of their ids."""

    live_judge: str | None  # the live judge whose verdicts are compared; None: there are none
    replay_judge: str | None
    turns: tuple[ComparedTurn, ...]
    live_cost: Cost
    replay_cost: Cost  # the cost of the votes that the replay asked for

    @property
    def confusion(self) -> Mapping[tuple[int | None, int | None], int]:
        """The number of turns with each pair of scores (live, replay), of the turns that both sides judged."""
        both = [turn for turn in self.turns if turn.live_status is not None and turn.replay_status is not None]
        return Counter((turn.live_score, turn.replay_score) for turn in both)

    def figures(self) -> dict[str, float | int | str | None]:
        """Return the comparison in numbers; None: nothing was scored by both."""
        scored = [turn for turn in self.turns if turn.live_score is not None and turn.replay_score is not None]
        live, again = [turn.live_score or 0 for turn in scored], [turn.replay_score or 0 for turn in scored]
        return {
            "live_judge": self.live_judge,
            "replay_judge": self.replay_judge,
            "turns": len(self.turns),
            "turns_scored_by_both": len(scored),
            "turns_scored_differently": sum(one != other for one, other in zip(live, again, strict=True)),
            "agreement": _mean([float(one == other) for one, other in zip(live, again, strict=True)]),
            "kappa": _kappa(live, again),
            "mean_score_live": _mean(live),
            "mean_score_replay": _mean(again),
            "score_drift": _mean([other - one for one, other in zip(live, again, strict=True)]),
            "turns_missing_in_replay": sum(turn.replay_status is None for turn in self.turns),
            "turns_missing_live": sum(turn.live_status is None for turn in self.turns),
            "turns_without_score_live": sum(
                turn.live_status is not None and turn.live_score is None for turn in self.turns
            ),
            "turns_without_score_replay": sum(
                turn.replay_status is not None and turn.replay_score is None for turn in self.turns
            ),
            "calls_live": self.live_cost.num_calls,
            "calls_replay": self.replay_cost.num_calls,
            "calls_failed_live": self.live_cost.num_failed,
            "calls_failed_replay": self.replay_cost.num_failed,
            "prompt_tokens_live": self.live_cost.prompt_tokens,
            "prompt_tokens_replay": self.replay_cost.prompt_tokens,
            "completion_tokens_live": self.live_cost.completion_tokens,
            "completion_tokens_replay": self.replay_cost.completion_tokens,
            "calls_uncounted_live": self.live_cost.num_uncounted,
            "calls_uncounted_replay": self.replay_cost.num_uncounted,
        }


def compare(live: Iterable[Event], replayed: Iterable[Event], *, turn_ids: frozenset[str]) -> Comparison:
    """Compare the verdicts on the turns in `turn_ids`, whose answers the replay read.

    On each side only the judge with the most verdicts counts; of several with as many, the first by name.
    """
    live, replayed = list(live), list(replayed)
    again = [event for event in replayed if isinstance(event, VerdictReached)]
    before = [event for event in live if isinstance(event, VerdictReached) and event.turn_id in turn_ids]
    replay_judge, live_judge = _most(again), _most(before)
    live_of = _by_turn(event for event in before if event.judge == live_judge)
    replay_of = _by_turn(event for event in again if event.judge == replay_judge)
    turns = [_turn(key, live_of.get(key), replay_of.get(key)) for key in sorted(live_of.keys() | replay_of.keys())]
    return Comparison(
        live_judge=live_judge,
        replay_judge=replay_judge,
        turns=tuple(turns),
        live_cost=Cost.of(
            event
            for event in live
            if isinstance(event, VoteCast) and event.turn_id in turn_ids and event.judge == live_judge
        ),
        replay_cost=Cost.of(event for event in replayed if isinstance(event, VoteCast)),
    )


def _most(verdicts: Sequence[VerdictReached]) -> str | None:
    counts = Counter(verdict.judge for verdict in verdicts)
    return max(sorted(counts), key=lambda judge: counts[judge], default=None)


def _by_turn(verdicts: Iterable[VerdictReached]) -> dict[tuple[str, str, int], VerdictReached]:
    found: dict[tuple[str, str, int], VerdictReached] = {}
    for verdict in verdicts:
        found.setdefault((verdict.session_id, verdict.turn_id, verdict.revision), verdict)
    return found


def _turn(key: tuple[str, str, int], live: VerdictReached | None, again: VerdictReached | None) -> ComparedTurn:
    session_id, turn_id, revision = key
    return ComparedTurn(
        session_id=session_id,
        turn_id=turn_id,
        revision=revision,
        live_status=None if live is None else live.status.value,
        live_score=None if live is None else live.score,
        replay_status=None if again is None else again.status.value,
        replay_score=None if again is None else again.score,
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _kappa(live: Sequence[int], again: Sequence[int]) -> float | None:
    """Return Cohen's kappa: agreement beyond what the scores' shares give by chance; None: chance gives all of it."""
    if not live:
        return None
    observed = sum(one == other for one, other in zip(live, again, strict=True)) / len(live)
    chance = sum(live.count(score) * again.count(score) for score in SCORES) / len(live) ** 2
    return None if math.isclose(chance, 1.0) else (observed - chance) / (1 - chance)
