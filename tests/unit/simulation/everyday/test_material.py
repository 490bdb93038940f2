"""The requests and wishes: how many, in whose hands, and with which words."""

import itertools
import re

import pytest

from clawstream.simulation.everyday import AnswerWish, Split, requests_by_kind, requests_of, wishes
from clawstream.simulation.everyday.scorer import WISH_IDS

MOST_SHARED = 0.45  # of the words of two requests together
WISHES = wishes()


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9']+", text.lower()))


def shared(one: str, other: str) -> float:
    return len(words(one) & words(other)) / len(words(one) | words(other))


def phrases(wish: AnswerWish) -> list[str]:
    return [*wish.hints, *wish.hints_held_out, *complaints(wish)]


def complaints(wish: AnswerWish) -> list[str]:
    return [*wish.says, *wish.says_held_out, *wish.rejects, *wish.rejects_held_out]


def test_there_are_enough_requests_of_each_kind_for_each_split() -> None:
    counts = {split: [len(found) for found in requests_by_kind(split).values()] for split in Split}
    assert {split: (len(found), min(found)) for split, found in counts.items()} == {
        Split.PEOPLE: (13, 20),
        Split.DEVELOPMENT: (13, 6),
        Split.REPORT: (13, 7),
    }


def test_the_first_requests_are_of_different_kinds() -> None:
    kinds = requests_by_kind(Split.DEVELOPMENT)
    first = requests_of(Split.DEVELOPMENT)[: len(kinds)]
    assert [next(kind for kind, found in kinds.items() if request in found) for request in first] == list(kinds)


def test_no_request_is_like_one_of_another_split() -> None:
    pairs = itertools.combinations([(split, request) for split in Split for request in requests_of(split)], 2)
    alike = [(one, other) for (a, one), (b, other) in pairs if a is not b and shared(one, other) >= MOST_SHARED]
    assert alike == []


def test_no_request_is_there_twice() -> None:
    found = [request.lower() for split in Split for request in requests_of(split)]
    assert len(set(found)) == len(found)


def test_each_wish_has_a_rule_and_each_rule_a_wish() -> None:
    assert sorted(wish.id for wish in WISHES) == sorted(WISH_IDS)


@pytest.mark.parametrize("wish", WISHES, ids=lambda wish: wish.id)
def test_a_wish_has_words_for_training_and_others_for_scores(wish: AnswerWish) -> None:
    assert (len(wish.hints), len(wish.hints_held_out)) == (4, 2)
    assert (len(wish.says), len(wish.says_held_out)) == (2, 1)
    assert (len(wish.rejects), len(wish.rejects_held_out)) == (2, 1)


def test_no_phrase_stands_for_two_wishes() -> None:
    found = [phrase for wish in WISHES for phrase in phrases(wish)]
    assert len(set(found)) == len(found)


def test_a_person_does_not_speak_as_the_judge() -> None:
    alike = [
        (said, hint)
        for wish in WISHES
        for said in complaints(wish)
        for hint in (*wish.hints, *wish.hints_held_out)
        if shared(said, hint) > 0.75
    ]
    assert alike == []
