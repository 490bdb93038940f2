"""Pictures for a policy without eyes: words in their place, the same in every request, and no refusal."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clawstream.events import ExchangeCompleted
from clawstream.gateway.dialects.anthropic import read_messages
from clawstream.gateway.requests.fields import BadRequest
from clawstream.gateway.requests.wire import read_request
from tests.parts.gateway.running_gateway import RunningGateway, everything, running_gateway
from tests.sessions import assistant, history, user

Json = dict[str, Any]
SESSION = {"X-Session-Id": "ann"}
PNG = "iVBORw0KGgo" + "A" * 5000
BY_USER = "(image omitted: model does not support images)"
BY_TOOL = "(tool image omitted: model does not support images)"
SHOWN: Json = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
BLOCK: Json = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
SAMPLED_CALL = '<tool_call>\n{"name": "Read", "arguments": {"path": "a.png"}}\n</tool_call>'


def text(said: str) -> Json:
    return {"type": "text", "text": said}


async def one_sequence(gateway: RunningGateway, num_answers: int) -> list[str]:
    """The prompts, each of which goes on from what was sampled after the one before."""
    exchanges = [event for event in await everything(gateway.log) if isinstance(event, ExchangeCompleted)]
    whole = history(exchanges)
    assert [exchange.num_spliced for exchange in exchanges] == list(range(num_answers))
    for before, after in pairwise(exchanges):
        so_far = whole[before.exchange_id].token_ids + before.output_ids
        assert whole[after.exchange_id].token_ids[: len(so_far)] == so_far
    assert not any(PNG.encode() in message for one in whole.values() for message in one.messages)
    return [gateway.renderer.decode(whole[exchange.exchange_id].token_ids) for exchange in exchanges]


async def test_a_conversation_goes_on_token_by_token_after_a_user_and_a_tool_showed_pictures(
    tokenizer_folder: Path,
) -> None:
    tools = [{"type": "function", "function": {"name": "Read", "parameters": {}}}]
    async with running_gateway(tokenizer_folder) as gateway:
        asked: list[Json] = [{"role": "user", "content": [text("What is this?"), SHOWN, SHOWN, text("And why?")]}]
        gateway.say(SAMPLED_CALL)
        first = await gateway.chat(asked, headers=SESSION, tools=tools)
        call = first.body["choices"][0]["message"]["tool_calls"][0]
        asked += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": [text("Read:"), SHOWN]},
        ]
        gateway.say("A cat.")
        assert (await gateway.chat(asked, headers=SESSION, tools=tools)).status == 200
        asked += [assistant("A cat."), user("No, a dog.")]
        assert (await gateway.chat(asked, headers=SESSION, tools=tools)).status == 200
        first_prompt, *_, last = await one_sequence(gateway, 3)
    assert f"What is this?{BY_USER}And why?" in first_prompt
    assert f"Read:{BY_TOOL}" in last


async def test_one_picture_that_claude_code_read_ends_no_session(tokenizer_folder: Path) -> None:
    tools = [{"name": "Read", "input_schema": {"type": "object"}}]

    async def ask(messages: list[Json]) -> Json:
        body = {"model": "policy", "max_tokens": 100, "messages": messages, "tools": tools}
        async with gateway.client.post(f"{gateway.url}/v1/messages", json=body, headers=SESSION) as answer:
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())

    async with running_gateway(tokenizer_folder) as gateway:
        asked: list[Json] = [user("Read a.png")]
        gateway.say(SAMPLED_CALL)
        called = (await ask(asked))["content"]
        result = {"type": "tool_result", "tool_use_id": called[0]["id"], "content": [BLOCK]}
        asked += [{"role": "assistant", "content": called}, {"role": "user", "content": [result]}]
        gateway.say("I see nothing.")
        said = (await ask(asked))["content"]
        asked += [{"role": "assistant", "content": said}, {"role": "user", "content": [BLOCK, text("Look.")]}]
        await ask(asked)
        *_, last = await one_sequence(gateway, 3)
    assert BY_TOOL in last
    assert f"{BY_USER}Look." in last


def test_what_a_picture_becomes_is_what_openclaw_itself_writes_for_such_a_model() -> None:
    shown: Json = {"role": "user", "content": [text("a"), SHOWN]}
    written: Json = {"role": "user", "content": [text("a"), text(BY_USER)]}
    ours, theirs = (read_request({"messages": [message]}) for message in (shown, written))
    assert (ours.messages, ours.messages_json, ours.sha256) == (theirs.messages, theirs.messages_json, theirs.sha256)
    assert read_messages({"max_tokens": 1, "messages": [{"role": "user", "content": [text("a"), BLOCK]}]}).messages == (
        written,
    )


@pytest.mark.parametrize("picture", [{"type": "image_url"}, {"type": "image_url", "image_url": 3}], ids=json.dumps)
def test_a_picture_that_is_none_is_refused_by_name(picture: Json) -> None:
    with pytest.raises(BadRequest, match=r"messages\[0\].content\[0\].image_url is"):
        read_request({"messages": [{"role": "user", "content": [picture]}]})


def test_a_picture_where_none_may_stand_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="'image_url' content; this policy reads text only"):
        read_request({"messages": [{"role": "system", "content": [SHOWN]}, user("Hello")]})
