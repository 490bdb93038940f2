"""The floor: which turn of a session without a sample is looked at again."""

from typing import Any

import pytest

from clawstream.cli.process import learns_from
from clawstream.config import RewardsSettings, TrainingSettings
from clawstream.conversation.floor import SecondLook, SecondLooks, Teaches, second_looks
from clawstream.conversation.history import REMEMBERED_OVER, SettledTurns, buried, marked
from clawstream.events import (
    HintAbsence,
    HintAbsent,
    HintFound,
    LearnsFrom,
    TurnPaired,
    TurnsSettled,
    VerdictReached,
    VerdictStatus,
)

TURNS = ("t0", "t1", "t2")
HINT = HintFound(
    session_id="s", turn_id="t0", judge="j", prompt_version="v", revision=0, hint="Use plain words.", num_offered=1
)


def all_teach(_turn_id: str) -> Teaches:
    return Teaches(by_verdict=True, by_hint=True)


def verdict(turn_id: str, score: int | None = 0, *, said: int = 0) -> VerdictReached:
    return VerdictReached(
        session_id="s",
        turn_id=turn_id,
        judge="j",
        prompt_version="v",
        revision=0,
        status=VerdictStatus.TIED if score == 0 else VerdictStatus.BELOW_QUORUM,
        score=score,
        num_positive=said // 2,
        num_neutral=1,
        num_negative=said - said // 2,
        num_unreadable=0,
        num_failed=0,
    )


def no_hint(turn_id: str) -> HintAbsent:
    return HintAbsent(
        session_id="s",
        turn_id=turn_id,
        judge="j",
        prompt_version="v",
        revision=0,
        reason=HintAbsence.NONE_OFFERED,
        num_offered=0,
    )


def turn(turn_id: str, *, interrupted: bool = False) -> TurnPaired:
    return TurnPaired(session_id="s", turn_id=turn_id, next_exchange_id="e", next_state=(1,), interrupted=interrupted)


def marks(*counts: int, done: bool = False) -> tuple[SettledTurns, ...]:
    made: tuple[SettledTurns, ...] = ()
    for number, count in enumerate(counts):
        made = marked(made, TurnsSettled(session_id="s", after_exchange_id=str(number), done=done), count)
    return made


def looks(at: tuple[SettledTurns, ...], said: tuple[int, ...], **seen: int | None) -> SecondLooks:
    """The second looks due in a session whose turns all have verdicts of 0, with so many votes behind them."""
    return second_looks(
        [turn(turn_id) for turn_id in TURNS],
        at,
        {turn_id: verdict(turn_id, said=number) for turn_id, number in zip(TURNS, said, strict=False)},
        {turn_id: no_hint(turn_id) for turn_id in TURNS},
        {turn_id: verdict(turn_id, score) for turn_id, score in seen.items()},
        all_teach,
    )


def due(settled: bool, *turns: tuple[str, int]) -> SecondLooks:
    return SecondLooks(due=tuple(SecondLook(turn_id=turn, num_turns=count) for turn, count in turns), settled=settled)


@pytest.mark.parametrize(("said", "best"), [((1, 3, 2), "t1"), ((2, 2, 2), "t0"), ((0, 0, 1), "t2")])
def test_the_turn_with_most_votes_that_take_a_side_is_looked_at_and_of_equals_the_earliest(
    said: tuple[int, ...], best: str
) -> None:
    assert looks(marks(3), said) == due(False, (best, 3))


def test_turns_that_came_after_the_mark_are_not_considered() -> None:
    assert looks(marks(1), (0, 3, 3)) == due(False, ("t0", 1))


def test_nothing_is_looked_at_before_every_turn_has_its_verdict() -> None:
    assert looks(marks(3), (1, 1)) == due(False)
    assert looks((), (1, 1, 1)) == due(True)


@pytest.mark.parametrize("score", [1, -1])
def test_a_session_that_the_floor_gave_a_sample_is_not_looked_at_again(score: int) -> None:
    assert looks(marks(1, 3), (0, 3, 0), t0=score) == due(True, ("t0", 1))


@pytest.mark.parametrize("score", [0, None])
def test_an_undecided_session_that_went_on_is_looked_at_again_at_another_turn(score: int | None) -> None:
    assert looks(marks(1, 3), (0, 3, 0), t0=score) == due(False, ("t0", 1), ("t1", 3))
    assert looks(marks(1, 3), (3, 0, 0), t0=score) == due(True, ("t0", 1))


def test_a_later_life_of_a_session_has_a_floor_of_its_own() -> None:
    assert looks(marks(1, 3, done=True), (3, 1, 2), t0=1) == due(False, ("t0", 1), ("t2", 3))


def test_a_mark_that_is_read_again_is_the_same_mark() -> None:
    settled = TurnsSettled(session_id="s", after_exchange_id="e", done=False)
    once = marked((), settled, 1)
    assert marked(once, settled, 3) is once


def test_a_verdict_of_one_or_a_hint_leaves_nothing_for_the_floor() -> None:
    decided = {"t0": verdict("t0", 1)}
    assert second_looks([turn("t0")], marks(1), decided, {"t0": no_hint("t0")}, {}, all_teach) == due(True)
    assert second_looks([turn("t0")], marks(1), {"t0": verdict("t0", None)}, {"t0": HINT}, {}, all_teach) == due(True)


@pytest.mark.parametrize(
    ("teaches", "score", "expected"),
    [
        (Teaches(by_verdict=True, by_hint=False), 0, due(False, ("t0", 1))),  # a tie and a hint, under `binary`
        (Teaches(by_verdict=True, by_hint=False), 1, due(True)),
        (Teaches(by_verdict=False, by_hint=True), 1, due(True)),
        (Teaches(by_verdict=False, by_hint=False), 1, due(True)),  # nothing can be learned from the answer
        (None, 1, due(False)),  # the answer is not known yet
    ],
)
def test_what_the_method_cannot_use_serves_no_session(
    teaches: Teaches | None, score: int, expected: SecondLooks
) -> None:
    found = second_looks(
        [turn("t0")], marks(1), {"t0": verdict("t0", score)}, {"t0": HINT}, {}, {"t0": teaches}.__getitem__
    )
    assert found == expected


def test_an_answer_that_gives_no_sample_leaves_the_look_to_another_turn() -> None:
    turns, said = [turn("t0"), turn("t1")], {"t0": verdict("t0", -1, said=9), "t1": verdict("t1", said=1)}
    hints: dict[str, HintFound | HintAbsent] = {"t0": HINT, "t1": no_hint("t1")}
    taught = {"t0": Teaches(by_verdict=False, by_hint=False), "t1": Teaches(by_verdict=True, by_hint=True)}
    assert second_looks(turns, marks(2), said, hints, {}, taught.get) == due(False, ("t1", 2))


@pytest.mark.parametrize(
    ("training", "rewards", "learns"),
    [
        ({}, {}, LearnsFrom()),
        ({"method": "binary"}, {}, LearnsFrom(hints=False)),
        ({"method": "opd"}, {}, LearnsFrom(verdicts=False)),
        ({"method": "stepwise"}, {}, LearnsFrom(hints=False)),
        ({"method": "binary"}, {"judge": 0.0}, LearnsFrom(verdicts=False, hints=False)),
        ({"method": "topk"}, {}, LearnsFrom(verdicts=False, hints_off_distribution=True)),
    ],
)
def test_the_settings_say_what_can_be_learned_from(
    training: dict[str, Any], rewards: dict[str, Any], learns: LearnsFrom
) -> None:
    found = learns_from(TrainingSettings(**training), RewardsSettings(**rewards))
    assert found == learns


def test_an_interrupted_answer_neither_takes_the_floor_from_its_session_nor_is_given_it() -> None:
    turns = [turn("t0", interrupted=True), turn("t1")]
    said = {"t0": verdict("t0", -1, said=9), "t1": verdict("t1", said=1)}
    hints = {turn_id: no_hint(turn_id) for turn_id in said}
    assert second_looks(turns, marks(2), said, hints, {}, all_teach) == due(False, ("t1", 2))
    assert second_looks(turns[:1], marks(1), said, hints, {}, all_teach) == due(True)
    assert second_looks(turns, marks(2), {"t1": said["t1"]}, hints, {}, all_teach) == due(False)


def test_of_what_is_over_the_newest_ids_are_remembered_and_each_once() -> None:
    settled = TurnsSettled(session_id="s", after_exchange_id="end", done=True)
    before = buried({}, (), ("old", "older"))

    assert list(buried(before, (SettledTurns(settled, 0, 2),), ("t0", "t1"))) == ["old", "older", "t0", "t1", "end"]
    many = [f"t{number}" for number in range(2 * REMEMBERED_OVER)]
    assert list(buried(before, (), many)) == many[REMEMBERED_OVER:]
