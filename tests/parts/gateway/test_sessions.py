"""Which session a request belongs to: by its own word, by what its client writes, by the history that it continues."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import ExchangeCompleted, TurnType
from clawstream.gateway.requests.fields import BadRequest
from clawstream.gateway.requests.profiles import RequestIdentity, name_request
from clawstream.gateway.requests.wire import read_request
from clawstream.gateway.sessions import SessionIndex
from tests import recorded
from tests.fakes.memory_log import MemoryLog
from tests.parts.gateway.running_gateway import QUESTION, RunningGateway, running_gateway
from tests.sessions import user

Json = dict[str, Any]
DAY_MS = 86_400_000
ANSWER: Json = {"role": "assistant", "content": "It is 4."}


def named(body: Json, headers: dict[str, str] | None = None) -> RequestIdentity:
    return name_request(headers or {}, read_request({"messages": QUESTION} | body))


@pytest.mark.parametrize(
    ("messages", "headers", "session_id"),
    [
        (recorded.FIRST_TURN, {}, "s1"),
        (recorded.USER_CORRECTS, {}, "s1"),
        (recorded.OTHER_SESSION, {}, "s2"),
        (recorded.TOOL_REQUEST, {"x-turn-type": "main"}, "s9"),
        (recorded.TOOL_RESULTS, {"x-turn-type": "main"}, "s9"),
        (recorded.USER_CORRECTS_AFTER_TOOLS, {"x-turn-type": "main"}, "s9"),
    ],
)
def test_openclaw_names_its_session_in_its_first_message(
    messages: list[Json], headers: dict[str, str], session_id: str
) -> None:
    found = named({"messages": messages}, headers | {"x-stainless-retry-count": "0"})
    assert (found.session_id, found.client, found.turn_type) == (session_id, "openclaw", TurnType.MAIN)
    assert found.retry_count == 0


def test_the_header_goes_before_the_body_and_the_body_before_the_client() -> None:
    body = {"messages": recorded.FIRST_TURN, "session_id": "b"}
    assert named(body, {"x-session-id": "h"}).session_id == "h"
    assert named(body).session_id == "b"
    assert named({"messages": recorded.FIRST_TURN, "metadata": {"session_id": "m"}}).session_id == "m"
    assert named({"user": "u", "prompt_cache_key": "k"}).session_id is None


@pytest.mark.parametrize(
    "prompt",
    [
        "Follow the heartbeat monitor scratch context when provided. Recurring tasks are automations.",
        "Read HEARTBEAT.md if it exists (workspace context).",
        "[OpenClaw heartbeat poll]",
        "[OpenClaw cron wake]",
        "Pre-compaction memory flush. Store durable memories only.",
        "[cron:7f nightly] Summarise the day.",
        "[Fri 2026-11-20 12:25 UTC] [cron:7f nightly] Summarise the day.",
    ],
)
def test_what_openclaw_asks_for_itself_is_a_side_turn(prompt: str) -> None:
    messages = [*recorded.USER_CORRECTS[:-1], ANSWER, user(prompt), recorded.BLOCK]
    assert named({"messages": messages}).turn_type is TurnType.SIDE
    assert named({"messages": messages}, {"x-turn-type": "main"}).turn_type is TurnType.MAIN


def test_a_user_who_speaks_of_cron_is_not_housekeeping() -> None:
    assert named({"messages": [user("What does [cron:x] mean?")]}).turn_type is TurnType.MAIN


def test_the_turn_type_is_said_by_header_then_body() -> None:
    assert named({"turn_type": "side"}, {"x-turn-type": " MAIN "}).turn_type is TurnType.MAIN
    assert named({"turn_type": "side"}).turn_type is TurnType.SIDE
    with pytest.raises(BadRequest, match="main or side"):
        named({"turn_type": "both"})
    with pytest.raises(BadRequest, match="main or side"):
        named({"turn_type": "both"}, {"x-turn-type": "main"})
    with pytest.raises(BadRequest, match="session id"):
        named({"session_id": "a b"}, {"x-session-id": "s"})


def test_a_retry_count_that_no_record_holds_counts_nothing() -> None:
    counts = [named({}, {"x-stainless-retry-count": said}).retry_count for said in ("2", "9" * 5000, "-1")]
    assert counts == [2, None, None]


def test_private_keys_are_no_part_of_what_a_retry_repeats() -> None:
    plain = read_request({"messages": QUESTION, "model": "policy", "metadata": {"a": "1"}})
    private = read_request(
        {
            "model": "policy",
            "metadata": {"a": "1", "session_id": "m"},
            "messages": QUESTION,
            "session_id": "s",
            "turn_type": "main",
            "session_done": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    other = read_request({"messages": QUESTION, "model": "policy", "metadata": {"a": "1"}, "temperature": 0})
    assert plain.sha256 == private.sha256
    assert plain.sha256 != other.sha256
    assert not {"session_id", "turn_type", "session_done"} & private.options.keys()


Said = st.text("ab", max_size=2)
Conversation = st.lists(st.tuples(Said, Said), min_size=1, max_size=4)


def turns(conversation: list[tuple[str, str]]) -> list[tuple[tuple[Json, ...], Json]]:
    """Each request's messages with its answer; the last message is a client's own block, as OpenClaw sends it."""
    said: list[Json] = [{"role": "system", "content": "You help."}]
    found = []
    for asked, answered in conversation:
        said = [*said, user(asked)]
        answer = {"role": "assistant", "content": answered}
        found.append(((*said, recorded.BLOCK), answer))
        said = [*said, answer]
    return found


@given(conversation=Conversation, scope=st.sampled_from(["", "u1"]))
def test_a_conversation_stays_in_its_session(conversation: list[tuple[str, str]], scope: str) -> None:
    index = SessionIndex(DAY_MS)
    for number, (messages, answer) in enumerate(turns(conversation)):
        found = index.find(messages, scope, retried=False)
        assert found == (None if number == 0 else "s")
        index.asked(messages, scope, "s", number)
        index.answered(messages, answer, scope, "s", f"e{number}", number)


@given(conversation=Conversation)
def test_conversations_of_two_users_are_never_joined(conversation: list[tuple[str, str]]) -> None:
    index = SessionIndex(DAY_MS)
    for number, (messages, answer) in enumerate(turns(conversation)):
        index.answered(messages, answer, "u1", "s1", f"e{number}", number)
        assert index.find(messages, "u2", retried=True) is None


def test_two_who_said_the_same_are_each_continued_once() -> None:
    index = SessionIndex(DAY_MS)
    first, second = turns([("hi", "hello"), ("more", "ok")])
    for session in ("s1", "s2"):
        index.asked(first[0], "", session, 0)
        index.answered(*first, "", session, f"e-{session}", 0)
    continued = set()
    for text in ("one", "other"):
        messages = (*second[0][:-2], user(text))
        found = index.find(messages, "", retried=False)
        assert found is not None
        index.asked(messages, "", found, 1)
        continued.add(found)
    assert continued == {"s1", "s2"}


def test_a_retry_of_the_first_request_is_in_the_first_one_s_session() -> None:
    index = SessionIndex(DAY_MS)
    index.asked(tuple(QUESTION), "", "s", 0)
    assert index.find(tuple(QUESTION), "", retried=True) == "s"
    assert index.find(tuple(QUESTION), "", retried=False) is None


def test_rewritten_tool_call_ids_and_argument_spacing_are_the_same_conversation() -> None:
    index = SessionIndex(DAY_MS)
    index.answered(tuple(recorded.TOOL_REQUEST), recorded.LOOKING, "", "s9", "e", 0)
    assert index.find(tuple(recorded.TOOL_RESULTS), "", retried=False) == "s9"


def test_what_is_older_than_the_window_is_forgotten() -> None:
    index = SessionIndex(1000)
    first, second = turns([("a", "b"), ("c", "d")])
    index.answered(*first, "", "s", "e", 0)
    index.answered((user("x"),), ANSWER, "", "t", "f", 1001)
    assert index.find(second[0], "", retried=False) is None
    assert index.newest_exchange("s") is None
    assert len(index) == 1


def test_no_more_sessions_are_kept_than_there_is_room_for() -> None:
    index = SessionIndex(DAY_MS, max_sessions=2)
    told = turns([("a", "b"), ("c", "d"), ("e", "f")])
    for number, (messages, answer) in enumerate(told):
        index.asked(messages, "", f"s{number}", 0)
        index.answered(messages, answer, "", f"s{number}", f"e{number}", 0)
    assert [index.newest_exchange(f"s{number}") for number in range(3)] == [None, "e1", "e2"]
    assert [index.session_of(f"e{number}") for number in range(3)] == [None, "s1", "s2"]
    assert [index.find(messages, "", retried=True) for messages, _ in told] == [None, "s1", "s2"]
    assert len(index) == 2


@pytest.fixture
async def gateway(tokenizer_folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer_folder) as found:
        yield found


async def test_a_continued_history_is_the_same_session_and_a_changed_one_is_not(gateway: RunningGateway) -> None:
    first = await gateway.chat()
    more = [*QUESTION, ANSWER, user("Sure?")]
    same = await gateway.chat(more)
    changed = await gateway.chat([*QUESTION, ANSWER | {"content": "It is 5."}, user("Sure?")])
    assert same.headers["x-session-id"] == first.headers["x-session-id"]
    assert changed.headers["x-session-id"] != first.headers["x-session-id"]
    exchanges = await gateway.recorded(ExchangeCompleted, at_least=3)
    assert sorted(exchange.client for exchange in exchanges) == ["history", "new", "new"]
    _, metrics = await gateway.get("/metrics")
    assert "clawstream_session_index_misses_total 1.0" in metrics


async def test_a_conversation_goes_on_in_its_session_after_a_restart(tokenizer_folder: Path) -> None:
    log = MemoryLog()
    async with running_gateway(tokenizer_folder, log=log) as before:
        first = await before.chat(user="u")
        more = [*QUESTION, ANSWER, user("Sure?")]
        second = await before.chat(more, user="u")
    async with running_gateway(tokenizer_folder, log=log) as after:
        third = await after.chat([*more, ANSWER, user("Really?")], user="u")
        stranger = await after.chat([*more, ANSWER, user("Really?")], user="v")
    assert third.headers["x-session-id"] == second.headers["x-session-id"] == first.headers["x-session-id"]
    assert stranger.headers["x-session-id"] != first.headers["x-session-id"]


async def test_each_recorded_request_of_openclaw_is_answered_in_its_session(gateway: RunningGateway) -> None:
    requests = (
        recorded.FIRST_TURN,
        recorded.USER_CORRECTS,
        recorded.OTHER_SESSION,
        recorded.TOOL_REQUEST,
        recorded.TOOL_RESULTS,
        recorded.USER_CORRECTS_AFTER_TOOLS,
    )
    for messages in requests:
        response = await gateway.chat(messages, stream=True, max_completion_tokens=8192)
        assert response.finish_reasons == ["stop"]
    exchanges = await gateway.recorded(ExchangeCompleted, at_least=6)
    assert sorted(exchange.session_id for exchange in exchanges) == ["s1", "s1", "s2", "s9", "s9", "s9"]
    assert {exchange.client for exchange in exchanges} == {"openclaw"}
    newest = json.loads(exchanges[-1].request.messages[-1])
    assert newest == recorded.BLOCK
