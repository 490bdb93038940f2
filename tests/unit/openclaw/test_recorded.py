"""What OpenClaw does beside answering people, as recorded: whose turn it is, and the turns around it."""

from typing import Any

import pytest

from clawstream.conversation.messages import text_of
from clawstream.events import TurnPaired, TurnType
from clawstream.gateway.requests.profiles import name_request
from clawstream.gateway.requests.wire import read_request
from tests import recorded
from tests.flow import Flow
from tests.sessions import Json, Session, user

ANSWER = "Answer 2."


@pytest.mark.parametrize(
    ("messages", "session_id", "turn_type"),
    [
        (recorded.HEARTBEAT, "m1", TurnType.SIDE),
        (recorded.USER_AFTER_HEARTBEATS, "m1", TurnType.MAIN),
        (recorded.TOOL_RESULTS_AFTER_HEARTBEATS, "m1", TurnType.MAIN),
        (recorded.USER_AFTER_AN_ALERT, "m1", TurnType.MAIN),
        (recorded.REMINDER, "m1", TurnType.SIDE),
        (recorded.COMMAND_ENDED, "m1", TurnType.SIDE),
        (recorded.CRON, None, TurnType.SIDE),
        (recorded.MEMORY_FLUSH, recorded._DETACHED, TurnType.SIDE),
        (recorded.OWN_FLUSH, recorded._DETACHED, TurnType.SIDE),
        (recorded.SUMMARY, None, TurnType.SIDE),
        (recorded.COMPACTED, "s20", TurnType.MAIN),
        (recorded.SUBAGENT, "f917de2e-2ce7-4665-8700-f18820b238cc", TurnType.MAIN),
        (recorded.SUBAGENT_REPORTS, "s10", TurnType.MAIN),
        (recorded.AFTER_AN_ABORT, "s12", TurnType.MAIN),
    ],
)
def test_whose_turn_a_recorded_request_is(messages: list[Json], session_id: str | None, turn_type: TurnType) -> None:
    found = name_request({}, read_request({"messages": messages}))
    assert (found.session_id, found.turn_type) == (session_id, turn_type)


def next_states(*requests: tuple[list[Json], Any, TurnType]) -> list[str]:
    """What the log says came after each answer that was paired, in one session."""
    session = Session()
    asked = {}
    for messages, answer, turn_type in requests:
        exchange = session.ask(messages, answer, turn_type=turn_type)
        asked[exchange.exchange_id] = messages
    paired = Flow().run(session.written).of(TurnPaired)
    return [" / ".join(text_of(asked[turn.next_exchange_id][i]) for i in turn.next_state) for turn in paired]


MAIN, SIDE = TurnType.MAIN, TurnType.SIDE
FIRST = [*recorded.HEARTBEAT[:2], recorded.BLOCK]


def test_the_answer_before_a_silent_heartbeat_is_judged_by_what_the_user_said_after_it() -> None:
    found = next_states(
        (FIRST, ANSWER, MAIN), (recorded.HEARTBEAT, "NO_REPLY", SIDE), (recorded.USER_AFTER_HEARTBEATS, "Hm.", MAIN)
    )
    assert found == ["[Sat 2026-11-21 08:25 UTC] After the heartbeat"]


def test_the_answer_before_a_heartbeat_that_spoke_is_judged_by_what_the_user_said_after_it() -> None:
    found = next_states(
        (FIRST, ANSWER, MAIN), (recorded.HEARTBEAT, "Disk full.", SIDE), (recorded.USER_AFTER_AN_ALERT, "Hm.", MAIN)
    )
    assert found == ["[Sat 2026-11-21 08:26 UTC] What now?"]


def test_an_answer_is_found_again_when_the_question_was_joined_with_heartbeats() -> None:
    found = next_states(
        (FIRST, ANSWER, MAIN),
        (recorded.USER_AFTER_HEARTBEATS, recorded.LOOKING, MAIN),
        (recorded.TOOL_RESULTS_AFTER_HEARTBEATS, "Done.", MAIN),
    )
    assert found[1].endswith("(Command exited with code 2) / two")


def test_an_answer_after_an_abort_is_judged_by_what_followed_it() -> None:
    more = [*recorded.AFTER_AN_ABORT[:-1], {"role": "assistant", "content": "Cut off."}, user("I see."), recorded.BLOCK]
    assert next_states((recorded.AFTER_AN_ABORT, "Cut off.", MAIN), (more, "Ok.", MAIN)) == ["I see."]


def test_an_answer_whose_question_was_summed_up_is_judged_by_what_followed_it() -> None:
    assert next_states((recorded.AFTER_AN_ABORT, "Answer 24.", MAIN), (recorded.COMPACTED, "I am.", MAIN)) == [
        "[Sat 2026-11-21 08:22 UTC] Fourth message"
    ]
