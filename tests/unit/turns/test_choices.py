"""A request with several answers: the one that comes back in the history has the next state, the others have none."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import OrphanReason, TurnOrphaned, TurnPaired
from tests.sessions import Session, assistant, user
from tests.unit.turns.test_pairing import fates, fold

ANSWERS = st.lists(st.sampled_from(["4", "four", "5"]), min_size=2, max_size=8)


def follow(session: Session, chosen: str, said: str = "go on") -> None:
    """The client's next request, which has this answer in its history."""
    session.ask([user("2 + 2?"), assistant(chosen), user(said)], "fine")


@given(st.lists(st.tuples(ANSWERS, st.integers(0, 7)), max_size=5))
def test_of_each_request_s_answers_the_one_that_was_echoed_is_paired_and_the_others_are_passed_over(
    rounds: Sequence[tuple[Sequence[str], int]],
) -> None:
    session, messages, chosen, expected = Session(), [user("2 + 2?")], [], []
    for answers, number in rounds:
        choices = session.choose(messages, answers)
        text = answers[number % len(answers)]
        chosen.append((text, len(messages) + 1, {one.exchange_id for one in choices}))
        expected.append({one.exchange_id for one, said in zip(choices, answers, strict=True) if said == text})
        messages = [*messages, assistant(text), user("go on")]
    session.ask(messages, "fine")
    written = fates(session.written)
    paired = [event for event in written if isinstance(event, TurnPaired)]
    assert [event.next_state for event in paired] == [(index,) for _, index, _ in chosen]
    assert all(event.turn_id in alike for event, alike in zip(paired, expected, strict=True))
    passed_over = {event.turn_id: event.reason for event in written if isinstance(event, TurnOrphaned)}
    everybody = {turn_id for *_, turn_ids in chosen for turn_id in turn_ids}
    assert passed_over.keys() == everybody - {event.turn_id for event in paired}
    assert set(passed_over.values()) <= {OrphanReason.REGENERATED}


def test_an_answer_that_the_client_changed_is_no_choice_and_all_are_edited() -> None:
    session = Session()
    session.choose([user("2 + 2?")], ["4", "four"])
    follow(session, "I say five")
    reasons = [event.reason for event in fates(session.written) if isinstance(event, TurnOrphaned)]
    assert reasons == [OrphanReason.EDITED, OrphanReason.EDITED]


def test_all_wait_while_nothing_is_echoed() -> None:
    session = Session()
    choices = session.choose([user("2 + 2?")], ["4", "four", "5"])
    state, written = fold(session.written)
    assert state is not None
    assert [item.turn_id for item in state.pending] == [choice.exchange_id for choice in choices]
    assert written == []
