"""A reaction is paired with the answer that it is about, whatever the client did to its history meanwhile."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import Event, ExchangeCompleted, ExchangeFailed, OrphanReason, TurnOrphaned, TurnPaired
from clawstream.turns.pairing import PairingState as State
from clawstream.turns.stage import step
from tests import recorded
from tests.sessions import Json, Session, assistant, record, user
from tests.unit.openclaw import recording
from tests.unit.turns.clients import INSTRUCTION, REPORT, SUMMARY, Client, Step, steps

NUMBERS = st.integers(0, 10**9).map(str)
FEW = st.sampled_from(["ok", "yes"])


def fates(events: list[Event]) -> list[Event]:
    state: State | None = None
    written: list[Event] = []
    for offset, event in enumerate(events):
        state, new, _ = step(state, record(event, offset=offset))
        written += new
    return written


def played(taken: list[Step]) -> tuple[Client, list[TurnPaired]]:
    client = Client()
    for one in [*taken, Step("the end", "over", "plain", 0)]:
        client.take(one)
    return client, [event for event in fates(client.session.written) if isinstance(event, TurnPaired)]


@given(steps(st.uuids().map(str), st.uuids().map(str)))
def test_every_answer_whose_echo_stands_in_a_history_is_paired(taken: list[Step]) -> None:
    client, paired = played(taken)
    assert {turn.turn_id for turn in paired} == client.echoed | set(client.reacted.values())
    assert {turn.turn_id for turn in paired if turn.interrupted} == set(client.reacted.values())


@given(steps(FEW, FEW) | steps(NUMBERS, FEW) | steps(FEW, NUMBERS))
def test_no_answer_is_paired_with_a_reaction_to_another_though_they_say_the_same(taken: list[Step]) -> None:
    client, paired = played(taken)
    for turn in paired:
        about = {client.answered_before(turn.next_exchange_id, index) for index in turn.next_state}
        assert about == {turn.turn_id}


def recorded_session(name: str) -> tuple[Session, dict[str, list[Json]]]:
    """A session of a real OpenClaw, as a gateway records it, and its requests by exchange."""
    played, asked = Session(name), {}
    for one in recording.session(name):
        exchange = (
            played.fail(one.messages, one.answer["content"]) if one.gone else played.ask(one.messages, one.answer)
        )
        asked[exchange.exchange_id] = one.messages
    return played, asked


def reactions(name: str) -> list[tuple[str, str]]:
    """What was paired: the answer, and who said what to it."""
    played, asked = recorded_session(name)
    exchanges = [event for event in played.written if isinstance(event, ExchangeCompleted | ExchangeFailed)]
    answers = {event.exchange_id: event.message or b"" for event in exchanges}
    return [
        recording.reaction(turn, json.loads(answers[turn.turn_id]), asked[turn.next_exchange_id])
        for turn in fates(played.written)
        if isinstance(turn, TurnPaired)
    ]


@pytest.mark.parametrize("name", recording.REACTIONS)
def test_in_a_session_of_a_real_openclaw_each_reaction_is_paired_with_its_answer(name: str) -> None:
    assert reactions(name) == recording.REACTIONS[name]
    orphans = [event for event in fates(recorded_session(name)[0].written) if isinstance(event, TurnOrphaned)]
    assert len(orphans) == recording.UNSHOWN.get(name, 0)


def pairs(*asked: tuple[list[Json], Json | str]) -> list[tuple[int, tuple[int, ...]]]:
    """Which of some requests' answers were paired, and with what of the next."""
    session = Session()
    ids = [session.ask(messages, answer).exchange_id for messages, answer in asked]
    return [
        (ids.index(turn.turn_id), turn.next_state) for turn in fates(session.written) if isinstance(turn, TurnPaired)
    ]


def test_an_answer_after_messages_that_the_client_joined_later_is_paired() -> None:
    joined = recorded.parts("Talk for long", "What happened?")
    found = pairs(
        ([user("Talk for long"), user("What happened?")], "I was cut off."),
        ([joined, assistant("I was cut off."), user("That is wrong.")], "Sorry."),
    )
    assert found == [(0, (2,))]


@pytest.mark.parametrize("dropped", [INSTRUCTION, REPORT, user("whatever the client says today")])
def test_an_answer_to_a_request_that_ended_in_what_is_dropped_later_is_paired(dropped: Json) -> None:
    found = pairs(([user("go"), dropped], "done"), ([user("go"), assistant("done"), user("wrong")], "sorry"))
    assert found == [(0, (2,))]


def test_an_instruction_of_the_client_is_no_reaction() -> None:
    history = [user("go"), assistant("done")]
    assert pairs(([user("go")], "done"), ([*history, INSTRUCTION], "more")) == []


def test_an_answer_right_behind_a_summary_is_paired_though_its_question_was_summed_up() -> None:
    summary = user(SUMMARY)
    found = pairs(([user("a"), user("b")], "done"), ([summary, assistant("done"), user("wrong")], "sorry"))
    assert found == [(0, (2,))]


def test_an_answer_that_the_summary_replaced_is_an_orphan() -> None:
    session = Session()
    session.ask([user("a"), user("b")], "done")
    session.ask([user(SUMMARY), user("wrong")], "sorry")
    assert [type(event) for event in fates(session.written)] == [TurnOrphaned]


def test_a_question_that_is_asked_again_behind_a_summary_decides_nothing_of_its_first_answer() -> None:
    session = Session()
    first = session.ask([user("a"), assistant("x"), user("b")], "done")
    session.fail([user(SUMMARY), user("b")])
    session.ask([user(SUMMARY), user("b"), assistant("done"), user("wrong")], "sorry")
    [turn] = fates(session.written)
    assert isinstance(turn, TurnPaired)
    assert (turn.turn_id, turn.next_state) == (first.exchange_id, (3,))


def test_where_old_words_stand_behind_a_summary_they_are_not_the_new_answer() -> None:
    asked = [user("a"), assistant("done"), user("b")]
    assert pairs((asked, "done"), ([user(SUMMARY), assistant("done"), user("c")], "sorry")) == []


def test_an_echo_of_an_answer_that_was_paired_before_is_nobody_elses() -> None:
    first, again = [user("a")], [user("a"), assistant("no"), user("b")]
    found = pairs(
        (first, "ok"), ([*first, assistant("ok"), user("x")], "hm"), (first, "no"), (again, "ok"),
        ([*first, assistant("ok"), user("y")], "hm"),
    )  # fmt: skip
    assert found == [(0, (2,)), (2, (2,))]


def test_what_follows_an_answer_ends_where_the_failed_request_ended_that_shows_it() -> None:
    session = Session()
    first = session.ask([user("What is 2+2?")], "It is four.")
    shown = [user("What is 2+2?"), assistant("It is four."), user("Please talk for long.")]
    failed = session.fail(shown)
    session.ask([*shown, user("That is wrong, shorter.")], "Sorry.")
    [turn] = [event for event in fates(session.written) if isinstance(event, TurnPaired)]
    assert (turn.turn_id, turn.next_exchange_id, turn.next_state) == (first.exchange_id, failed.exchange_id, (2,))


ASKED = [user("hello"), assistant("hi"), user("Please talk for long.")]
ABORTED = user("<turn_aborted>\nThe previous turn was interrupted.\n</turn_aborted>")
WRONG = user("That is wrong, shorter.")


@pytest.mark.parametrize(
    ("history", "next_state"),
    [
        ([*ASKED, WRONG], (3,)),
        ([*ASKED, recorded.BLOCK, WRONG], (4,)),
        ([*ASKED, ABORTED, WRONG, recorded.BLOCK], (3, 4)),
        ([*ASKED, assistant("and so"), WRONG], (4,)),
        ([*ASKED, assistant("and so on and [stopped]"), WRONG], (4,)),
        ([*ASKED[:2], recorded.parts("Please talk for long.", "That is wrong.")], (2,)),
        ([*ASKED[:2], user("Please talk for long.\n\nThat is wrong.")], (2,)),
        ([*ASKED[:2], recorded.parts("Please talk for long.", "That is wrong."), recorded.BLOCK, WRONG], (2, 4)),
        ([user(SUMMARY), ASKED[2], WRONG], (2,)),
        ([user(SUMMARY), ASKED[2], assistant("and so on"), WRONG], (3,)),
        ([recorded.parts(SUMMARY, "Please talk for long."), WRONG], (1,)),
        ([ASKED[0], ASKED[2], WRONG], (2,)),
    ],
)
def test_the_reaction_to_an_interrupted_answer_is_its_own(history: list[Json], next_state: tuple[int, ...]) -> None:
    session = Session()
    first = session.ask(ASKED[:1], "hi")
    stopped = session.fail([*ASKED, recorded.BLOCK], "and so on and")
    session.ask(history, "Sorry.")
    paired = [event for event in fates(session.written) if isinstance(event, TurnPaired)]
    assert [(turn.turn_id, turn.next_state, turn.interrupted) for turn in paired] == [
        (first.exchange_id, (2,), False),
        (stopped.exchange_id, next_state, True),
    ]


@pytest.mark.parametrize(
    ("history", "reason"),
    [
        ([*ASKED, assistant("something else"), WRONG], OrphanReason.EDITED),
        ([*ASKED, assistant("and so on goes another model's answer"), WRONG], OrphanReason.EDITED),
        (
            [*ASKED, {**assistant("and so on"), "tool_calls": [recorded.call("call_1", "{}")]}, WRONG],
            OrphanReason.EDITED,
        ),
        ([*ASKED[:2], user("Please talk for long, but not so long.")], OrphanReason.EDITED),
        ([user(SUMMARY), WRONG], OrphanReason.COMPACTED),
        ([user("start over")], OrphanReason.RESET),
    ],
)
def test_an_interrupted_answer_without_a_reaction_to_it_alone_is_an_orphan(
    history: list[Json], reason: OrphanReason
) -> None:
    session = Session()
    stopped = session.fail(ASKED, "and so on")
    session.ask(history, "Sorry.")
    [orphan] = fates(session.written)
    assert isinstance(orphan, TurnOrphaned)
    assert (orphan.turn_id, orphan.reason) == (stopped.exchange_id, reason)


CALLED: list[Json] = [
    {"role": "assistant", "content": None, "tool_calls": [recorded.call("call_1", "{}")]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Tool exec not found"},
]


@pytest.mark.parametrize("answered", [[], [assistant("There is no")]])
def test_an_interrupted_answer_after_a_call_that_the_client_drops_has_its_reaction(answered: list[Json]) -> None:
    session = Session()
    stopped = session.fail([*ASKED, *CALLED], "There is no such")
    session.ask([*ASKED, *answered, WRONG], "Sorry.")
    [turn] = fates(session.written)
    assert isinstance(turn, TurnPaired)
    assert (turn.turn_id, turn.next_state) == (stopped.exchange_id, (3 + len(answered),))


def test_a_question_that_was_asked_before_proves_no_reaction_to_the_answer_that_was_interrupted_later() -> None:
    session = Session()
    session.fail([user("Go on."), assistant("one"), user("Go on.")], "two")
    session.ask([user("Go on."), WRONG], "Sorry.")
    [orphan] = fates(session.written)
    assert isinstance(orphan, TurnOrphaned)


def test_of_an_answer_that_was_cut_off_and_then_given_whole_the_whole_one_is_paired() -> None:
    session = Session()
    cut = session.fail(ASKED, "and so")
    whole = session.ask(ASKED, "and so on")
    session.ask([*ASKED, assistant("and so on"), WRONG], "Sorry.")
    found = [
        (type(event), event.turn_id) for event in fates(session.written) if isinstance(event, TurnPaired | TurnOrphaned)
    ]
    assert found == [(TurnOrphaned, cut.exchange_id), (TurnPaired, whole.exchange_id)]


def test_a_failed_request_that_showed_nothing_has_no_reaction() -> None:
    session = Session()
    session.fail(ASKED)
    session.ask([*ASKED, WRONG], "Sorry.")
    assert fates(session.written) == []
