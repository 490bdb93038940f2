"""A request that names no session: it joins the one session of its trace that said the same, and nobody else's."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.gateway.access.key_file import add_key
from clawstream.gateway.access.keys import Allowance
from clawstream.gateway.sessions import SessionIndex
from tests.fakes.memory_log import MemoryLog
from tests.parts.gateway.access.test_keys import bearer
from tests.parts.gateway.running_gateway import RunningGateway, running_gateway
from tests.sessions import Json, user
from tests.unit.openclaw import recording

DAY_MS = 86_400_000
TRACE = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
TOOLS = [{"type": "function", "function": {"name": "exec", "parameters": {}}}]
CALLED = '<tool_call>\n{"name": "exec", "arguments": {"command": "echo sett-$((1+1))"}}\n</tool_call>'
FIRST = recording.session("settled_tools")[0].messages


def settled(trace_id: str = "t", scope: str = "", *also: str) -> SessionIndex:
    """A session of OpenClaw's after tools and an answer that says nothing; others in its trace have said the same."""
    index = SessionIndex(DAY_MS)
    for session_id in ("s", *also):
        for number, one in enumerate(recording.session("settled_tools")[:2]):
            asked = tuple(one.messages)
            index.asked(asked, scope, session_id, number)
            index.answered(asked, one.answer, scope, session_id, f"{session_id}{number}", number, trace_id)
    return index


RETRY = tuple(recording.session("settled_tools")[2].messages)


def test_openclaws_retry_after_tools_which_names_no_session_is_in_that_of_its_trace() -> None:
    assert settled().find(RETRY, "", retried=False, trace_id="t") == "s"


@pytest.mark.parametrize(
    ("index", "trace_id"),
    [
        (settled(), "another"),
        (settled(), None),
        (settled("t", "another key"), "t"),
        (settled("t", "", "an equal one"), "t"),
    ],
)
def test_a_request_without_a_name_joins_no_session_by_its_words_alone_or_one_of_several(
    index: SessionIndex, trace_id: str | None
) -> None:
    assert index.find(RETRY, "", retried=False, trace_id=trace_id) is None


def test_a_request_that_only_shares_its_trace_with_a_session_is_not_in_it() -> None:
    other = (user("Please settle that."), *RETRY[2:])
    assert settled().find(other, "", retried=False, trace_id="t") is None


# Session, trace and key: two of one key have said the same in the trace "w".
SAID = [("s", "t", "k"), ("s", "t", "k"), ("r", "u", "k"), ("r", "t", "l"), ("p", "w", "k"), ("q", "w", "k")]


@given(st.permutations(SAID))
def test_in_whatever_order_the_log_is_read_a_request_joins_the_same_session(told: list[tuple[str, str, str]]) -> None:
    index = SessionIndex(DAY_MS)
    messages, answer, *_ = recording.session("settled_tools")[0]
    for number, (session_id, trace_id, key) in enumerate(told):
        index.answered(tuple(messages), answer, key, session_id, f"e{number}", number, trace_id)
    places = [(trace_id, key) for trace_id in "tuw" for key in "kl"]
    found = {place: index.find(RETRY, place[1], retried=False, trace_id=place[0]) for place in places}
    assert found == dict.fromkeys(places) | {("t", "k"): "s", ("u", "k"): "r", ("t", "l"): "r"}


async def session_of(gateway: RunningGateway, headers: dict[str, str], messages: list[Json], **more: Any) -> str:
    answer = await gateway.chat(messages, headers=headers | TRACE, **more)
    assert answer.status == 200
    return answer.headers["x-session-id"]


async def test_a_retry_without_a_name_joins_its_own_key_s_and_user_s_session_alone_before_and_after_a_restart(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """All say the same in the same trace; whoever joins another's session would be refused, or be in it."""
    log, keys = MemoryLog(), tmp_path / "keys.json"
    anna, ben = (bearer(add_key(keys, name, Allowance())) for name in ("anna", "ben"))
    async with running_gateway(tokenizer_folder, log=log, keys_file=keys, say=CALLED) as before:
        own = await session_of(before, anna, FIRST, tools=TOOLS)
        found = [await session_of(before, key, list(RETRY), user=name) for key, name in ((ben, None), (anna, "v"))]
    async with running_gateway(tokenizer_folder, log=log, keys_file=keys) as after:
        found += [await session_of(after, key, list(RETRY), user=name) for key, name in ((ben, None), (anna, "v"))]
        retried = await session_of(after, anna, list(RETRY))
    assert retried == own
    assert own not in found
