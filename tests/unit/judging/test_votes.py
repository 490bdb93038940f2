"""Votes to verdicts and hints: absence is no number, and no order matters."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import (
    MAX_OTHER_HINTS,
    MIN_HINT_CHARACTERS,
    HintAbsence,
    Question,
    VerdictReached,
    VerdictStatus,
    VoteCast,
    VoteStatus,
    words_of,
)
from clawstream.judging.votes import VotingRules, choose, conclusions, offers, others

FAILED = "failed"
SCORES = st.lists(st.sampled_from([1, 0, -1, None, FAILED]), min_size=1, max_size=15)
LONG = "Write it in plain words."


def vote(ballot: int, score: int | str | None, hint: str | None = None) -> VoteCast:
    status = VoteStatus.READABLE if isinstance(score, int) else VoteStatus.UNREADABLE
    return VoteCast(
        session_id="s",
        turn_id="t",
        question=Question.SCORE,
        judge="judge@test",
        prompt_version="v",
        revision=0,
        ballot=ballot,
        status=VoteStatus.FAILED if score == FAILED else status,
        score=score if isinstance(score, int) else None,
        hint=hint,
        text="",
        error=None,
        prompt_tokens=None,
        completion_tokens=None,
        latency_ms=1,
        cast_at_ms=0,
    )


def votes(scores: Sequence[int | str | None]) -> list[VoteCast]:
    return [vote(ballot, score) for ballot, score in enumerate(scores)]


def result(*scores: int | str | None, quorum: int = 1) -> VerdictReached:
    cast = {vote.ballot: vote for vote in votes(scores)}
    [verdict] = conclusions(cast, cast[0], VotingRules(num_votes=len(cast), quorum=quorum, hint_quorum=1))
    assert isinstance(verdict, VerdictReached)
    return verdict


@given(SCORES, st.randoms(use_true_random=False), st.integers(1, 8))
def test_the_order_of_votes_does_not_matter(scores: list[int | str | None], rng: random.Random, quorum: int) -> None:
    shuffled = rng.sample(scores, len(scores))
    assert result(*shuffled, quorum=quorum) == result(*scores, quorum=quorum)


@given(SCORES, st.integers(1, 8))
def test_votes_that_say_nothing_never_change_a_score(scores: list[int | str | None], quorum: int) -> None:
    found, readable = result(*scores, quorum=quorum), [score for score in scores if isinstance(score, int)]
    without = result(*readable, quorum=quorum) if readable else result(None, quorum=quorum)
    assert (found.status, found.score) == (without.status, without.score)


@given(SCORES, st.integers(1, 8))
def test_a_score_is_what_strictly_more_votes_say_than_anything_else(
    scores: list[int | str | None], quorum: int
) -> None:
    found = result(*scores, quorum=quorum)
    others = [score for score in (1, 0, -1) if score != found.score]
    ahead = found.score is not None and all(scores.count(found.score) > scores.count(other) for other in others)
    assert ahead == (found.status is VerdictStatus.DECIDED)


@given(SCORES)
def test_no_vote_is_lost_in_the_tally(scores: list[int | str | None]) -> None:
    counts = result(*scores)
    assert (counts.num_positive, counts.num_neutral, counts.num_negative, counts.num_unreadable, counts.num_failed) == (
        scores.count(1),
        scores.count(0),
        scores.count(-1),
        scores.count(None),
        scores.count(FAILED),
    )


@pytest.mark.parametrize(
    ("scores", "quorum", "status", "score"),
    [
        ((1, 1, -1), 2, VerdictStatus.DECIDED, 1),
        ((0, 0, 1), 2, VerdictStatus.DECIDED, 0),
        ((1, -1), 2, VerdictStatus.TIED, 0),
        ((1, 0, -1), 2, VerdictStatus.TIED, 0),
        ((1, None, FAILED), 2, VerdictStatus.BELOW_QUORUM, None),
        ((None, None, None), 1, VerdictStatus.BELOW_QUORUM, None),
    ],
)
def test_votes_come_to(
    scores: tuple[int | str | None, ...], quorum: int, status: VerdictStatus, score: int | None
) -> None:
    found = result(*scores, quorum=quorum)
    assert (found.status, found.score) == (status, score)


def test_the_longest_hint_is_kept_and_of_equals_the_first() -> None:
    cast = [vote(2, 1, LONG), vote(1, 1, LONG[:-1] + "!"), vote(0, 1, "Use no bold."), vote(3, -1, None)]
    assert choose(cast, quorum=3) == "Write it in plain words!"
    assert len(offers(cast)) == 3


WORDS = st.text("aB \n", min_size=1, max_size=MIN_HINT_CHARACTERS + 3)


@given(st.lists(st.one_of(st.none(), WORDS), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_beside_the_longest_hint_the_next_longest_are_kept_each_in_words_of_its_own(
    hints: list[str | None], rng: random.Random
) -> None:
    cast = [vote(number, -1 if hint is None else 1, hint) for number, hint in enumerate(hints)]
    chosen = choose(cast, quorum=1)
    if isinstance(chosen, HintAbsence):
        return
    beside = others(cast, chosen)
    assert others(rng.sample(cast, len(cast)), chosen) == beside
    said = [chosen, *(other.hint for other in beside)]
    assert len({*map(words_of, said)}) == len(said) <= 1 + MAX_OTHER_HINTS
    assert said == sorted(said, key=len, reverse=True)
    assert all(offers([cast[other.ballot]]) == [other.hint] for other in beside)
    left_out = [hint for hint in offers(cast) if words_of(hint) not in {*map(words_of, said)}]
    enough = [hint for hint in left_out if len(hint) >= MIN_HINT_CHARACTERS]
    assert not enough or (len(beside) == MAX_OTHER_HINTS and len(max(enough, key=len)) <= len(said[-1]))


@pytest.mark.parametrize(
    ("cast", "reason"),
    [
        ([vote(0, FAILED), vote(1, FAILED)], HintAbsence.FAILED),
        ([vote(0, FAILED), vote(1, None)], HintAbsence.UNREADABLE),
        ([vote(0, -1), vote(1, None)], HintAbsence.NONE_OFFERED),
        ([vote(0, 1, None), vote(1, -1)], HintAbsence.NONE_OFFERED),
        ([vote(0, 1, "0123456789"), vote(1, -1)], HintAbsence.TOO_SHORT),
    ],
)
def test_without_a_hint_the_reason_is_said(cast: list[VoteCast], reason: HintAbsence) -> None:
    assert choose(cast, quorum=1) is reason


def test_a_hint_of_eleven_characters_is_long_enough() -> None:
    assert choose([vote(0, 1, "01234567890")], quorum=1) == "01234567890"


@given(st.lists(st.sampled_from([LONG, None]), min_size=1, max_size=8), st.integers(1, 9))
def test_a_hint_that_fewer_votes_offer_than_needed_is_none(hints: list[str | None], quorum: int) -> None:
    cast = [vote(number, -1 if hint is None else 1, hint) for number, hint in enumerate(hints)]
    num_offered = hints.count(LONG)
    outvoted = HintAbsence.OUTVOTED if num_offered else HintAbsence.NONE_OFFERED
    assert choose(cast, quorum=quorum) == (LONG if num_offered >= quorum else outvoted)
