"""With `policy.adapters = "metadata.agent"` an entry of a request's metadata names whose adapter answers and learns."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from clawstream.events import ExchangeCompleted
from tests.fakes.memory_log import MemoryLog
from tests.parts.gateway.running_gateway import QUESTION, RunningGateway, read, running_gateway
from tests.sessions import assistant, user

SURE = [*QUESTION, assistant("It is 4."), user("Sure?")]


@pytest.fixture
async def gateway(tokenizer_folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer_folder, adapters="metadata.agent") as found:
        yield found


def of(agent: str | None) -> dict[str, Any]:
    """The part of a body that names the agent."""
    return {} if agent is None else {"metadata": {"agent": agent, "session_id": "s"}}


async def in_order(gateway: RunningGateway, num: int) -> list[ExchangeCompleted]:
    found = await gateway.recorded(ExchangeCompleted, at_least=num)
    return sorted(found, key=lambda exchange: exchange.received_at_ms)


async def test_a_session_that_names_another_agent_each_turn_goes_on_token_by_token_and_teaches_each_its_own(
    gateway: RunningGateway,
) -> None:
    for messages, agent in ((QUESTION, "anna"), (SURE, "ben"), ([*SURE, assistant("It is 4."), user("Oh")], None)):
        await gateway.chat(messages, headers={"X-Session-Id": "s"}, **of(agent))
        await asyncio.sleep(0.002)  # so that no two are received in the same millisecond
    exchanges = await in_order(gateway, 3)
    assert [one.policy_id for one in exchanges] == ["policy+anna", "policy+ben", "policy"]
    assert {one.session_id for one in exchanges} == {"s"}
    asked = [call.request for call in gateway.engine.calls]
    assert [request.extra_key for request in asked] == ["policy+anna:0", "policy+ben:0", "policy:0"]
    for earlier, answer, later in zip(asked, exchanges, asked[1:], strict=False):
        begun = (*earlier.input_ids, *answer.output_ids)
        assert tuple(later.input_ids[: len(begun)]) == begun


async def test_two_agents_with_the_same_history_are_in_sessions_of_their_own_also_after_a_restart(
    tokenizer_folder: Path,
) -> None:
    log, own = MemoryLog(), {"anna": {"agent": "anna"}, "ben": {"agent": "ben"}}
    async with running_gateway(tokenizer_folder, log=log, adapters="metadata.agent") as before:
        begun = {name: await before.chat(metadata=metadata) for name, metadata in own.items()}
        goes_on = await before.chat(SURE, metadata=own["anna"])
    async with running_gateway(tokenizer_folder, log=log, adapters="metadata.agent") as after:
        restarted = await after.chat(SURE, metadata=own["ben"])
        nobody = await after.chat(SURE)
    sessions = {name: response.headers["x-session-id"] for name, response in begun.items()}
    assert sessions["anna"] != sessions["ben"]
    assert goes_on.headers["x-session-id"] == sessions["anna"]
    assert restarted.headers["x-session-id"] == sessions["ben"]
    assert nobody.headers["x-session-id"] not in sessions.values()


async def test_a_name_that_is_none_is_refused_and_nothing_is_generated_or_recorded(gateway: RunningGateway) -> None:
    for name in ("", "two words", "a+b", "a/b", "a:b", "..", "-v1", "\u00e4", "a\n", "a'b", "x" * 65):
        response = await gateway.chat(metadata={"agent": name})
        error = response.body["error"]
        assert (response.status, error["param"]) == (400, "metadata.agent"), name
        assert f"metadata.agent is {name!r}" in error["message"]
        assert "expected 1 to 64 letters, digits or . _ @ -" in error["message"]
        assert "Nothing was generated" in error["message"]
    assert gateway.engine.calls == []
    assert (await gateway.chat(metadata={"agent": "x" * 64})).status == 200
    assert (await gateway.exchange()).policy_id == f"policy+{'x' * 64}"


async def test_a_group_of_one_agent_is_no_other_agents_group(gateway: RunningGateway) -> None:
    for agent in ("anna", "ben", None):
        await gateway.chat(headers={"X-Group-Id": "task"}, **of(agent))
    await gateway.chat(headers={"X-Group-Id": "anna/task"}, **of(None))
    await gateway.chat(n=2, **of("anna"))
    exchanges = await gateway.recorded(ExchangeCompleted, at_least=6)
    named = {one.group_id for one in exchanges if one.choice_of is None}
    assert named == {"anna/task", "ben/task", "/task", "/anna/task"}
    assert {one.group_id for one in exchanges if one.choice_of is not None} == {
        f"anna/{one.choice_of}" for one in exchanges if one.choice_of is not None
    }


@pytest.mark.parametrize(
    ("entry", "path", "body"),
    [
        ("agent", "chat/completions", {"messages": QUESTION}),
        ("agent", "responses", {"input": QUESTION}),
        ("agent", "messages", {"messages": QUESTION, "max_tokens": 9}),
        ("user_id", "messages", {"messages": QUESTION, "max_tokens": 9}),
    ],
    ids=["Chat Completions", "Responses", "Messages", "Messages, by Anthropic's own entry"],
)
async def test_each_api_takes_the_entry(tokenizer_folder: Path, entry: str, path: str, body: dict[str, Any]) -> None:
    async with running_gateway(tokenizer_folder, adapters=f"metadata.{entry}") as gateway:
        for metadata, status in (({entry: "anna"}, 200), ({entry: "two words"}, 400), ({"other": "ben"}, 200)):
            whole = {"model": "policy", "metadata": metadata} | body
            async with gateway.client.post(f"{gateway.url}/v1/{path}", json=whole) as answer:
                response = await read(answer)
            assert response.status == status
        exchanges = await in_order(gateway, 2)
    assert [one.policy_id for one in exchanges] == ["policy+anna", "policy"]
