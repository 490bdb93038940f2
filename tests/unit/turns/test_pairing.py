"""Pairing: every answer that was echoed and followed by something gives one turn, and nothing else does."""

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.conversation import history as standing
from clawstream.conversation.messages import Message, said_in
from clawstream.events import (
    Event,
    ExchangeCompleted,
    OrphanReason,
    SessionIdle,
    TurnOrphaned,
    TurnPaired,
    TurnsSettled,
    TurnType,
)
from clawstream.turns.pairing import MAX_PENDING
from clawstream.turns.pairing import PairingState as State
from clawstream.turns.stage import SESSION_IDLE_S, step, tick, turns_stage
from tests import recorded
from tests.sessions import SECOND_MS, Json, Session, assistant, record, user
from tests.unit.turns.clients import SUMMARY

PAIRS = st.lists(st.tuples(st.sampled_from(["ok", "yes", "4"]), st.sampled_from(["go on", "4", "no"])), max_size=40)


def fold(events: Iterable[Event], state: State | None = None) -> tuple[State | None, list[Event]]:
    written: list[Event] = []
    for offset, event in enumerate(events):
        state, new, _ = step(state, record(event, offset=offset))
        written += new
    return state, written


def fates(events: Iterable[Event]) -> list[Event]:
    return fold(events)[1]


def chat(pairs: Sequence[tuple[str, str]]) -> Session:
    """A plain chat; each pair is an answer and the user's next words."""
    session, messages = Session(), [user("hello")]
    for answer, reply in pairs:
        session.ask(messages, answer)
        messages = [*messages, assistant(answer), user(reply)]
    return session


def turn_of(answered: ExchangeCompleted, following: ExchangeCompleted, *next_state: int) -> TurnPaired:
    return TurnPaired(
        session_id=answered.session_id,
        turn_id=answered.exchange_id,
        next_exchange_id=following.exchange_id,
        next_state=next_state,
    )


@given(PAIRS)
def test_each_answer_of_a_chat_is_paired_with_the_reply_to_it(pairs: list[tuple[str, str]]) -> None:
    asked = [event for event in chat(pairs).written if isinstance(event, ExchangeCompleted)]
    expected = [
        turn_of(answered, following, 2 * number + 2) for number, (answered, following) in enumerate(pairwise(asked))
    ]
    assert fates(asked) == expected


@given(PAIRS, st.lists(st.integers(1, 3), min_size=40, max_size=40))
def test_redelivery_writes_no_turn_twice(pairs: list[tuple[str, str]], copies: list[int]) -> None:
    once = chat(pairs).written
    delivered = [event for event, times in zip(once, copies, strict=False) for _ in range(times)]
    assert fates(delivered) == fates(once)


@given(PAIRS, st.data())
def test_reading_again_from_any_offset_writes_nothing_new(pairs: list[tuple[str, str]], data: st.DataObject) -> None:
    log = chat(pairs).written
    offset = data.draw(st.integers(0, len(log)))
    assert fates(log + log[offset:]) == fates(log)


@given(st.lists(st.sampled_from(["ask", "choose", "again", "side", "failed", "reset", "edit", "block"]), max_size=30))
def test_no_answer_has_two_fates_and_none_is_forgotten(moves: list[str]) -> None:
    session, messages, mains = Session(), [user("hello")], set()
    for number, move in enumerate(moves):
        if move == "side":
            session.ask([user("title?")], "a title", turn_type=TurnType.SIDE)
        elif move == "failed":
            session.fail(messages)
        elif move == "choose":
            answers = [f"answer {number}", f"other {number}", f"answer {number}"]
            mains |= {choice.exchange_id for choice in session.choose(messages, answers)}
            messages = [*messages, assistant(answers[number % 3]), user("next")]
        else:
            sent = [*messages, recorded.BLOCK] if move == "block" else messages
            mains.add(session.ask(sent, f"answer {number}").exchange_id)
        if move in ("ask", "block"):
            messages = [*messages, assistant(f"answer {number}"), user("next")]
        elif move == "reset":
            messages = [user(f"start over {number}")]
        elif move == "edit":
            messages = [*messages, assistant("something else"), user("next")]
    state, written = fold(session.written)
    decided = [event.turn_id for event in written if isinstance(event, TurnPaired | TurnOrphaned)]
    pending = [] if state is None else [item.turn_id for item in state.pending]
    assert sorted([*decided, *pending]) == sorted(mains)


def test_openclaw_user_reply_is_the_next_state_and_its_own_block_is_not() -> None:
    session = Session("s1")
    first = session.ask(recorded.FIRST_TURN, recorded.GREETING)
    second = session.ask(recorded.USER_CORRECTS, "2 and 2 is 4")
    assert fates(session.written) == [turn_of(first, second, 3)]


def test_openclaw_other_session_pairs_nothing() -> None:
    session = Session("s2")
    session.ask(recorded.OTHER_SESSION, "hello")
    assert fates(session.written) == []


def test_openclaw_parallel_tool_results_are_one_next_state_with_rewritten_call_ids() -> None:
    session = Session("s9")
    looking = session.ask(recorded.TOOL_REQUEST, recorded.LOOKING)
    finished = session.ask(recorded.TOOL_RESULTS, recorded.FINISHED)
    corrected = session.ask(recorded.USER_CORRECTS_AFTER_TOOLS, "sorry")
    assert fates(session.written) == [turn_of(looking, finished, 3, 4), turn_of(finished, corrected, 6)]


def test_an_answer_whose_words_come_back_elsewhere_is_not_delivered() -> None:
    session = Session()
    asked = session.ask([user("a"), assistant("yes"), user("b")], "yes")
    session.ask([user("a"), assistant("yes"), user("c"), assistant("no"), user("d")], "fine")
    assert fates(session.written) == [orphan(session, asked, OrphanReason.EDITED)]


@pytest.mark.parametrize(
    "echo",
    [
        assistant("  4\n"),
        {"role": "assistant", "content": [{"type": "text", "text": "4"}]},
        {"role": "assistant", "content": "4", "tool_calls": []},
    ],
)
def test_an_echo_may_differ_in_white_space_parts_and_reasoning(echo: Json) -> None:
    session = Session()
    first = session.ask([user("2+2?")], {"role": "assistant", "content": "4", "reasoning_content": "easy"})
    second = session.ask([user("2+2?"), echo, user("thanks")], "welcome")
    assert fates(session.written) == [turn_of(first, second, 2)]


def test_a_retry_keeps_both_answers_until_the_echo_tells_which_was_delivered() -> None:
    session = Session()
    lost, shown = session.ask([user("a")], "first"), session.ask([user("a")], "second")
    assert fates(session.written) == []
    following = session.ask([user("a"), assistant("second"), user("b")], "third")
    assert fates(session.written) == [orphan(session, lost, OrphanReason.REGENERATED), turn_of(shown, following, 2)]


def test_of_two_attempts_the_earlier_is_paired_when_it_is_the_one_echoed() -> None:
    session = Session()
    shown, lost = session.ask([user("a")], "first"), session.ask([user("a")], "second")
    following = session.ask([user("a"), assistant("first"), user("b")], "third")
    assert fates(session.written) == [turn_of(shown, following, 2), orphan(session, lost, OrphanReason.EDITED)]


def test_of_two_attempts_with_equal_answers_only_the_newer_is_paired() -> None:
    session = Session()
    lost, shown = session.ask([user("a")], "same"), session.ask([user("a")], "same")
    following = session.ask([user("a"), assistant("same"), user("b")], "third")
    assert fates(session.written) == [orphan(session, lost, OrphanReason.REGENERATED), turn_of(shown, following, 2)]


def test_an_echo_without_a_next_state_stays_pending() -> None:
    session = Session()
    first = session.ask([user("a")], "begun")
    session.ask([user("a"), assistant("begun")], "and ended")
    assert fates(session.written) == []
    third = session.ask([user("a"), assistant("begun"), user("go on")], "so")
    assert turn_of(first, third, 2) in fates(session.written)


def test_a_side_turn_neither_pairs_nor_ends_a_pending_answer() -> None:
    session = Session()
    first = session.ask([user("a")], "answer")
    session.ask([user("a"), assistant("answer"), user("give it a title")], "title", turn_type=TurnType.SIDE)
    second = session.ask([user("a"), assistant("answer"), user("b")], "more")
    assert fates(session.written) == [turn_of(first, second, 2)]


def test_a_failed_exchange_shows_what_its_history_shows_and_gives_no_answer() -> None:
    session = Session()
    first = session.ask([user("a")], "answer")
    failed = session.fail([user("a"), assistant("answer"), user("b")])
    session.ask([user("a"), assistant("answer"), user("b")], "more")
    state, written = fold(session.written)
    assert [event for event in written if isinstance(event, TurnPaired)] == [
        TurnPaired(session_id="s", turn_id=first.exchange_id, next_exchange_id=failed.exchange_id, next_state=(2,))
    ]
    assert state is not None
    assert failed.exchange_id not in [item.turn_id for item in state.pending]


def test_a_request_sent_before_the_answer_was_complete_decides_nothing() -> None:
    session = Session()
    first = session.ask([user("a")], "slow", took_ms=5 * SECOND_MS)
    session.ask([user("beside")], "quick")
    for _ in range(5):
        session.num += 1
    last = session.ask([user("a"), assistant("slow"), user("b")], "more")
    assert turn_of(first, last, 2) in fates(session.written)


@pytest.mark.parametrize(
    ("history", "reason"),
    [
        ([user("u1"), assistant("a1"), user("u2"), assistant("mine"), user("u3")], OrphanReason.EDITED),
        ([user("u1"), assistant("a1"), user("other"), assistant("mine"), user("u3")], OrphanReason.EDITED),
        ([user("summary"), user("u2"), user("u3")], OrphanReason.COMPACTED),
        ([user("hello again")], OrphanReason.RESET),
    ],
)
def test_a_history_without_the_answer_orphans_it_and_says_why(history: list[Json], reason: OrphanReason) -> None:
    session = Session()
    asked = session.ask([user("u1"), assistant("a1"), user("u2")], "a2")
    session.ask(history, "next")
    assert fates(session.written) == [orphan(session, asked, reason)]


def test_an_answer_that_survives_compaction_is_paired() -> None:
    session = Session()
    first = session.ask([user("u1"), assistant("a1"), user("u2")], "a2")
    second = session.ask([user("summary"), user("u2"), assistant("a2"), user("u3")], "a3")
    assert fates(session.written) == [turn_of(first, second, 3)]


def test_an_answer_to_a_message_that_the_client_rewrote_in_place_is_paired() -> None:
    session = Session()
    first = session.ask([user("u1"), assistant("a1"), user("context: ...\nu2")], "a2")
    second = session.ask([user("u1"), assistant("a1"), user("u2"), assistant("a2"), user("u3")], "a3")
    assert fates(session.written) == [turn_of(first, second, 4)]


def test_a_request_that_rests_on_an_unknown_one_pairs_nothing_until_a_whole_one_comes() -> None:
    session = Session()
    session.ask([user("a")], "first")
    known = session.ask([user("a"), assistant("first"), user("b")], "second")
    session.forget()
    last = session.ask([user("a"), assistant("first"), user("b"), assistant("second"), user("c")], "third")
    assert fates(session.written[1:]) == [turn_of(known, last, 4)]


def test_asking_the_same_for_ever_keeps_a_bounded_number_of_answers() -> None:
    session = Session()
    for number in range(MAX_PENDING + 5):
        session.ask([user("a")], f"answer {number}")
    state, written = fold(session.written)
    assert state is not None
    assert (len(state.pending), len(written)) == (MAX_PENDING, 5)


def test_a_done_session_leaves_nothing_behind_and_says_that_its_turns_are_settled() -> None:
    session = chat([("yes", "and?"), ("no", "why?")])
    newest = session.written[-1]
    assert isinstance(newest, ExchangeCompleted)
    session.done()
    state, written = fold(session.written)
    assert state is None
    assert written[1:] == [TurnsSettled(session_id="s", after_exchange_id=newest.exchange_id, done=True)]


def test_a_session_of_side_turns_only_settles_nothing() -> None:
    session = Session()
    session.ask([user("a")], "b", turn_type=TurnType.SIDE)
    session.done()
    assert fates(session.written) == []


def test_an_idle_session_is_said_to_be_idle_once_and_its_answer_still_pairs() -> None:
    session = Session()
    first = session.ask([user("a")], "answer")
    state, _ = fold(session.written)
    assert state is not None
    assert tick(state, 1799 * SECOND_MS, 1800).events == ()
    state, events, _ = tick(state, 1800 * SECOND_MS, 1800)
    idle = SessionIdle(session_id="s", after_exchange_id=first.exchange_id, idle_s=1800)
    assert state is not None
    assert list(events) == [idle]
    assert tick(state, 9999 * SECOND_MS, 1800).events == ()
    second = session.ask([user("a"), assistant("answer"), user("b")], "more")
    settled = TurnsSettled(session_id="s", after_exchange_id=first.exchange_id, done=False)
    assert fates([first, idle, second]) == [settled, turn_of(first, second, 2)]


def test_an_idle_mark_that_a_newer_exchange_overtook_settles_nothing() -> None:
    session = chat([("yes", "and?"), ("no", "why?")])
    first = session.written[0]
    assert isinstance(first, ExchangeCompleted)
    late = SessionIdle(session_id="s", after_exchange_id=first.exchange_id, idle_s=1800)
    assert fates([*session.written, late]) == fates(session.written)


def test_a_rebuilt_session_is_not_said_to_be_idle_again() -> None:
    first = Session().ask([user("a")], "answer")
    idle = SessionIdle(session_id="s", after_exchange_id=first.exchange_id, idle_s=1800)
    state, _ = fold([first, idle])
    assert state is not None
    assert tick(state, 9999 * SECOND_MS, 1800).events == ()


def test_stages_remember_a_session_for_longer_than_it_takes_to_be_idle() -> None:
    assert turns_stage().retain_ms >= 2 * SESSION_IDLE_S * SECOND_MS


def orphan(session: Session, asked: ExchangeCompleted, reason: OrphanReason) -> TurnOrphaned:
    newest = session.written[-1]
    assert isinstance(newest, ExchangeCompleted)
    return TurnOrphaned(
        session_id=session.session_id, turn_id=asked.exchange_id, next_exchange_id=newest.exchange_id, reason=reason
    )


def test_what_a_changed_history_costs_does_not_grow_with_how_often_the_same_was_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cost(num_answers: int) -> int:
        session = chat([("ok", f"and {number}?") for number in range(num_answers)])
        state, _ = fold(session.written)
        left = [user(SUMMARY), user(f"and {num_answers - 2}?"), assistant("ok"), user("no")]
        summarised = session.ask(left, "sorry")
        calls = 0

        def counted(message: Message) -> Sequence[Hashable]:
            nonlocal calls
            calls += 1
            return said_in(message)

        monkeypatch.setattr(standing, "said_in", counted)
        _, [fate] = fold([summarised], state)
        assert isinstance(fate, TurnPaired)
        return calls

    assert cost(96) < 4 * cost(24) + 24
