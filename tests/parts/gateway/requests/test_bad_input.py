"""Requests that can't be answered: each says what is wrong, what is expected, and generates nothing."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from clawstream.config import EngineSettings, GatewaySettings, Settings
from clawstream.errors import ConfigError, PartUnavailable
from clawstream.events import ExchangeCompleted, ExchangeFailed
from clawstream.gateway.app import serve
from clawstream.gateway.http.connection import Bounds
from clawstream.gateway.requests.fields import BadRequest
from clawstream.gateway.requests.wire import read_request
from tests.fakes.memory_log import MemoryLog
from tests.parts.gateway.running_gateway import QUESTION, RunningGateway, running_gateway

TOOL_MESSAGE = {"role": "tool", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}


def allowing(*names: str | None) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}


CALLS_G = {"type": "function", "function": {"name": "g"}}
SOUND = {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}


@pytest.fixture(scope="module")
async def shared(tokenizer_folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer_folder, bounds=Bounds(max_body_bytes=100_000)) as found:
        yield found


@pytest.fixture
def gateway(shared: RunningGateway) -> RunningGateway:
    """One gateway for all that it refuses; what earlier tests asked of the engine is forgotten."""
    shared.engine.calls.clear()
    return shared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hi"}, "messages", "expected a list"),
        ({"messages": ["hi"]}, "messages[0]", "expected an object"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "expected a string"),
        ({"messages": [TOOL_MESSAGE]}, "messages[0]", "tool_call_id"),
        ({"messages": [SOUND]}, "messages[0].content[0]", "input_audio"),
        ({"n": 9}, "n", "n is 9; expected an integer from 1 to 8"),
        ({"n": 0}, "n", "n is 0; expected an integer from 1 to 8"),
        ({"n": True}, "n", "n is true; expected an integer from 1 to 8"),
        ({"presence_penalty": False}, "presence_penalty", "-2 to 2"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "expected true or false"),
        ({"audio": {"voice": "x"}}, "audio", "not supported"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "text, json_object or json_schema"),
        ({"response_format": "json_object"}, "response_format", "text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is missing"),
        ({"json_schema": "{"}, "json_schema", "no JSON"),
        ({"json_schema": [1]}, "json_schema", "expected a JSON schema"),
        ({"regex": "a+", "response_format": {"type": "json_object"}}, "regex", "one grammar at most"),
        ({"regex": 7}, "regex", "expected a string"),
        ({"regex": "\ud800"}, "regex", "half a character"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most 8 tokens"),
        ({"min_tokens": -1}, "min_tokens", "from 0 to"),
        ({"logit_bias": {"one": 1}}, "logit_bias", "names 'one'"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "-100 to 100"),
        ({"logit_bias": {"1": 5, "01": -5}}, "logit_bias", "names '01'"),
        ({"min_tokens": 1, "regex": "yes"}, "min_tokens", "ends where the grammar does"),
        ({"min_tokens": 1, "response_format": {"type": "json_object"}}, "min_tokens", "beside response_format"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "1025 tokens"),
        ({"tool_choice": "required"}, "tool_choice", "no tools to call"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice", "required"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice", "not supported"),
        ({"tool_choice": CALLS_G, "tools": [TOOL]}, "tool_choice", "'g', which is none of the tools"),
        ({"tool_choice": "required", "tools": [TOOL], "regex": "a"}, "tool_choice", "one grammar at most"),
        ({"tool_choice": "required", "tools": [TOOL], "min_tokens": 1}, "min_tokens", "beside tool_choice"),
        ({"tool_choice": allowing("g"), "tools": [TOOL]}, "tool_choice", "'g', which is none of the tools"),
        ({"tool_choice": allowing(None), "tools": [TOOL]}, "tool_choice.allowed_tools.tools[0]", "with a name"),
        ({"tool_choice": allowing(), "tools": [TOOL]}, "tool_choice", "no tools to call"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]", "which /v1/responses takes"),
        ({"tools": [{"type": "web"}]}, "tools[0]", "function with a name"),
        ({"temperature": 3}, "temperature", "0 to 2"),
        ({"temperature": "hot"}, "temperature", "a number"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"max_tokens": 0}, "max_tokens", "from 1 to"),
        ({"seed": 1.5}, "seed", "an integer"),
        ({"seed": -(2**63) - 1}, "seed", "an integer"),
        ({"stop": [""]}, "stop", "none empty"),
        ({"stop": 7}, "stop", "strings"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"frequency_penalty": 2.1}, "frequency_penalty", "-2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0.01 to 2"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty", "0.01 to 2"),
        ({"min_p": 1.5}, "min_p", "0 to 1"),
        ({"guided_json": {"type": "object"}}, "guided_json", "expected no guided_json"),
        ({"logprobs": 1}, "logprobs", "expected true or false"),
        ({"top_logprobs": 2}, "top_logprobs", "without logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"turn_type": "other"}, "turn_type", "main or side"),
        ({"session_id": "two words"}, "session_id", "without spaces"),
        ({"session_id": 7}, "session_id", "expected a string"),
        ({"metadata": "m"}, "metadata", "expected an object"),
        ({"stream_options": []}, "stream_options", "expected an object"),
        ({"chat_template_kwargs": {"no_such": 1}}, "messages", "no_such"),
        ({"chat_template_kwargs": {"enable_thinking": {}}}, "messages", "not a boolean"),
        ({"chat_template_kwargs": False}, "messages", "not an object"),
    ],
)
async def test_a_wrong_field_is_named(gateway: RunningGateway, change: dict[str, Any], param: str, words: str) -> None:
    response = await gateway.post(json.dumps({"model": "policy", "messages": QUESTION} | change).encode())
    error = response.body["error"]
    assert (response.status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]
    assert gateway.engine.calls == []


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b'{"model": NaN}', b"\xff\xfe", b'"text"', b"[]", b"null", b"[" * 50_000, b'{"a": ' * 15_000],
)
async def test_a_body_that_is_no_json_object_is_refused(gateway: RunningGateway, raw: bytes) -> None:
    response = await gateway.post(raw)
    assert response.status == 400
    assert "JSON" in response.body["error"]["message"]


async def test_an_unknown_model_is_told_which_one_is_served(gateway: RunningGateway) -> None:
    response = await gateway.post(json.dumps({"model": "gpt-7", "messages": QUESTION}).encode())
    assert (response.status, response.body["error"]["code"]) == (404, "model_not_found")
    assert "'policy'" in response.body["error"]["message"]


async def test_a_prompt_longer_than_the_context_is_refused_as_such(gateway: RunningGateway) -> None:
    response = await gateway.chat([{"role": "user", "content": "x" * 3000}])
    assert (response.status, response.body["error"]["code"]) == (400, "context_length_exceeded")
    assert "2048" in response.body["error"]["message"]
    assert gateway.engine.calls == []


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_of_20_mb_is_refused_and_not_kept(gateway: RunningGateway, declared: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(320):
            yield b"x" * 65_536

    headers = {"content-length": str(20 * 2**20)} if declared else {}
    async with gateway.client.post(f"{gateway.url}/v1/chat/completions", data=pieces(), headers=headers) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (413, "request_too_large")
    assert "100000 bytes" in error["message"]
    assert gateway.engine.calls == []


async def test_a_large_body_can_be_read_up_to_the_limit(gateway: RunningGateway) -> None:
    padding = "x" * 90_000
    response = await gateway.chat(user=padding)
    assert response.status == 200


async def test_what_is_not_there_is_a_404_and_a_wrong_method_a_405(gateway: RunningGateway) -> None:
    assert (await gateway.get("/v1/nothing"))[0] == 404
    status, text = await gateway.get("/v1/chat/completions")
    assert (status, json.loads(text)["error"]["message"]) == (
        405,
        "GET /v1/chat/completions is not offered; use POST.",
    )


async def test_nothing_refused_is_recorded_and_the_next_request_is_answered(gateway: RunningGateway) -> None:
    before = len(await gateway.recorded(ExchangeCompleted, at_least=0))
    await gateway.post(b"{")
    assert (await gateway.chat()).status == 200
    assert len(await gateway.recorded(ExchangeCompleted)) == before + 1
    assert await gateway.recorded(ExchangeFailed, at_least=0) == []


async def test_only_the_key_opens_the_gateway(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, api_key="right") as gateway:
        no_key = await gateway.chat()
        wrong = await gateway.chat(headers={"Authorization": "Bearer wrong"})
        other = await gateway.chat(headers={"Authorization": "Basic right"})
        right = await gateway.chat(headers={"Authorization": "Bearer right"})
        models, _ = await gateway.get("/v1/models")
        alive, _ = await gateway.get("/healthz")
    assert [no_key.status, wrong.status, other.status, right.status] == [401, 401, 401, 200]
    assert wrong.body["error"]["code"] == "invalid_api_key"
    assert "right" not in json.dumps([no_key.body, wrong.body, other.body])
    assert (models, alive) == (401, 200)


async def test_a_taken_port_is_said_by_name(gateway: RunningGateway) -> None:
    port = int(gateway.url.rpartition(":")[2])
    taken = gateway.settings.model_copy(update={"gateway": GatewaySettings(port=port)})
    with pytest.raises(PartUnavailable, match=f"gateway.port {port}"):
        await serve(taken, MemoryLog(), stop=asyncio.Event())


async def test_a_model_folder_without_a_tokenizer_is_said_by_name(tmp_path: Path) -> None:
    settings = Settings(engine=EngineSettings(urls=("http://127.0.0.1:9",), model_path=tmp_path))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        await serve(settings, MemoryLog(), stop=asyncio.Event())


def test_stop_strings_that_no_record_would_hold_beside_their_request_are_refused() -> None:
    with pytest.raises(BadRequest, match="a string of 400000 characters; expected at most 1024") as error:
        read_request({"messages": QUESTION, "stop": ["x" * 400_000] * 16})
    assert (error.value.status, error.value.param) == (400, "stop")
    assert len(read_request({"messages": QUESTION, "stop": ["x" * 1024] * 16}).asked.stop) == 16
