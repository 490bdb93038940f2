"""Penalties and grammars: the engine gets them by its names, the log says them, and none is taken for the policy's."""

import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from clawstream.config import GatewaySettings, SamplesSettings
from clawstream.events import ExchangeCompleted, Shaping, TokenBias
from clawstream.gateway.requests.fields import BadRequest
from clawstream.gateway.requests.wire import read_request, sampling_of
from clawstream.rendering import calling
from tests.parts.gateway.running_gateway import QUESTION, RunningGateway, running_gateway

SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}}
OVERRIDE = SamplesSettings(off_distribution="gateway_override")


@pytest.fixture
async def gateway(tokenizer_folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer_folder) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "shaping"),
    [
        ({"frequency_penalty": 0.5}, Shaping(frequency_penalty=0.5)),
        ({"presence_penalty": -2}, Shaping(presence_penalty=-2)),
        ({"repetition_penalty": 1.1}, Shaping(repetition_penalty=1.1)),
        ({"min_p": 0.05}, Shaping(min_p=0.05)),
        ({"min_tokens": 3}, Shaping(min_new_tokens=3)),
        ({"logit_bias": {"7": -100}}, Shaping(logit_bias=(TokenBias(token_id=7, bias=-100),))),
        ({"response_format": {"type": "json_object"}}, Shaping(json_schema='{"type": "object"}')),
        ({"json_schema": SCHEMA}, Shaping(json_schema=json.dumps(SCHEMA, separators=(",", ":")))),
        ({"json_schema": json.dumps(SCHEMA)}, Shaping(json_schema=json.dumps(SCHEMA, separators=(",", ":")))),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}},
            Shaping(json_schema=json.dumps(SCHEMA, separators=(",", ":"))),
        ),
        ({"regex": "It is [0-9]"}, Shaping(regex="It is [0-9]")),
        ({"ebnf": 'root ::= "It is 4."', "min_p": 0.5}, Shaping(ebnf='root ::= "It is 4."', min_p=0.5)),
    ],
    ids=str,
)
async def test_what_shapes_the_answer_reaches_the_engine_and_is_on_the_exchange_which_is_not_of_the_policy(
    gateway: RunningGateway, asked: dict[str, Any], shaping: Shaping
) -> None:
    response = await gateway.chat(**asked, temperature=1)
    exchange = await gateway.exchange()
    assert response.status == 200
    assert response.body["choices"][0]["message"]["content"] == "It is 4."
    assert [call.request.sampling.shaping for call in gateway.engine.calls] == [exchange.sampling.shaping] == [shaping]
    assert not exchange.sampling.of_the_policy


async def test_what_is_neutral_leaves_the_answer_the_policy_s_own(gateway: RunningGateway) -> None:
    await gateway.chat(
        temperature=1, frequency_penalty=0, presence_penalty=0.0, repetition_penalty=1, min_p=0, min_tokens=0,
        logit_bias={"7": 0, "8": None}, response_format={"type": "text"}, regex="", ebnf=None, json_schema=None,
    )  # fmt: skip
    exchange = await gateway.exchange()
    assert (exchange.sampling.shaping, exchange.sampling.of_the_policy) == (None, True)


@pytest.mark.parametrize(("num_letters", "fits"), [(2**16, True), (2**16 + 1, False)])
def test_a_grammar_is_as_long_as_can_be_recorded_beside_its_request_or_it_is_refused(
    num_letters: int, fits: bool
) -> None:
    grammar = "é" * num_letters
    body = {"messages": QUESTION, "ebnf": grammar}
    with nullcontext() if fits else pytest.raises(BadRequest, match="ebnf is a grammar of 131074 bytes"):
        assert read_request(body).asked.shaping == Shaping(ebnf=grammar)


async def test_a_gateway_that_samples_from_the_whole_distribution_drops_penalties(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, samples=OVERRIDE) as gateway:
        await gateway.chat(temperature=0.5, frequency_penalty=1, min_tokens=2)
        exchange = await gateway.exchange()
    assert [call.request.sampling.shaping for call in gateway.engine.calls] == [exchange.sampling.shaping] == [None]
    assert (exchange.sampling.temperature, exchange.sampling.of_the_policy) == (0.5, True)


def test_tools_whose_grammar_is_too_long_to_be_recorded_are_refused() -> None:
    with pytest.raises(BadRequest, match="a grammar of 131073 bytes"):
        sampling_of(
            read_request({"messages": QUESTION}).asked,
            grammar="x" * (2**17 + 1),
            num_prompt_tokens=1,
            context_length_tokens=9,
            default_max_tokens=1,
            default_temperature=1,
        )


def test_unless_the_settings_say_otherwise_no_limit_is_named_and_the_temperature_is_as_documented() -> None:
    assert (GatewaySettings().default_max_tokens, GatewaySettings().default_temperature) == (None, 0.7)


@pytest.mark.parametrize(
    ("asked", "default", "expected", "by_client"),
    [
        (None, None, 90, False),
        (None, 20, 20, False),
        (None, 500, 90, False),
        (30, 20, 30, True),
        (90, 20, 90, True),
        (500, 20, 90, False),
    ],
)
def test_where_nobody_names_a_limit_an_answer_may_have_what_the_context_leaves(
    asked: int | None, default: int | None, expected: int, by_client: bool
) -> None:
    """And it is on record whether the client asked for no more."""
    sampling = sampling_of(
        read_request({"messages": QUESTION, "max_tokens": asked}).asked,
        grammar=None,
        num_prompt_tokens=10,
        context_length_tokens=100,
        default_max_tokens=default,
        default_temperature=0.7,
    )
    assert (sampling.max_tokens, sampling.limit_by_client, sampling.temperature) == (expected, by_client, 0.7)


async def test_an_answer_of_one_call_at_most_ends_with_it_and_is_the_policy_s_own(gateway: RunningGateway) -> None:
    tools = [{"type": "function", "function": {"name": "exec", "parameters": {}}}]
    call = '<tool_call>\n{"name": "exec", "arguments": {}}\n</tool_call>'
    gateway.say(f"{call}\n{call}")
    response = await gateway.chat(temperature=1, tools=tools, parallel_tool_calls=False)
    exchange = await gateway.exchange()
    [choice] = response.body["choices"]
    assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")
    assert exchange.output_ids == gateway.renderer.encode(call)
    assert exchange.sampling.of_the_policy


TOOL = {"type": "function", "function": {"name": "exec"}}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
CALL = '<tool_call>\n{"name": "exec", "arguments": {}}\n</tool_call>'


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_beside_a_schema_a_call_is_a_call_and_json_is_content_by_one_grammar_on_the_exchange(
    gateway: RunningGateway, stream: bool
) -> None:
    for said, content, calls in ((CALL, "", 1), ('{"sum": 4}', '{"sum": 4}', 0)):
        gateway.say(said)
        response = await gateway.chat(tools=[TOOL], response_format=BY_SCHEMA, temperature=1, stream=stream)
        assert response.status == 200
        deltas = [event["choices"][0]["delta"] for event in response.events] or [response.body["choices"][0]["message"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == content
        assert sum(len(delta.get("tool_calls") or ()) for delta in deltas) == calls
    [shaping, _] = [call.request.sampling.shaping for call in gateway.engine.calls]
    exchange = (await gateway.recorded(ExchangeCompleted, at_least=2))[0]
    assert exchange.sampling.shaping == shaping
    assert shaping is not None
    assert (shaping.json_schema, "root ::=" in (shaping.ebnf or "")) == (None, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "by_engine"),
    [("none", True), ("required", False), ({"type": "function", "function": {"name": "exec"}}, False)],
    ids=str,
)
async def test_a_schema_stands_alone_where_no_tool_may_be_called_and_not_at_all_where_one_has_to_be(
    gateway: RunningGateway, choice: Any, by_engine: bool
) -> None:
    gateway.say('{"sum": 4}' if by_engine else CALL)
    response = await gateway.chat(tools=[TOOL], tool_choice=choice, response_format=BY_SCHEMA)
    [shaping] = [call.request.sampling.shaping for call in gateway.engine.calls]
    assert (response.status, shaping is not None) == (200, True)
    assert shaping is not None
    assert (shaping.json_schema is not None, "sum" in (shaping.ebnf or "")) == (by_engine, False)


def test_tools_that_alone_are_allowed_are_as_if_no_others_were_there() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [TOOL]}}
        chat = read_request({"messages": QUESTION, "tools": [other, TOOL], "tool_choice": choice})
        assert chat.options == {"tools": [TOOL], "tool_choice": mode}


async def test_a_family_whose_calls_no_grammar_writes_refuses_tools_beside_a_schema_and_says_what_to_do(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "_FORMS", {})
    response = await gateway.chat(tools=[TOOL], response_format=BY_SCHEMA)
    assert (response.status, response.body["error"]["param"]) == (400, "tool_choice")
    assert "leave the schema out, or send tool_choice none" in response.body["error"]["message"]
    assert gateway.engine.calls == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "grammar",
    [
        {"response_format": {"type": "json_object"}},
        {"regex": "a"},
        {"ebnf": "b"},
        {"tools": [TOOL], "tool_choice": "required"},
    ],
    ids=str,
)
async def test_it_refuses_a_grammar_without_which_the_client_could_not_read_the_answer(
    tokenizer_folder: Path, grammar: dict[str, Any]
) -> None:
    async with running_gateway(tokenizer_folder, samples=OVERRIDE) as gateway:
        response = await gateway.chat(**grammar)
        assert gateway.engine.calls == []
        side = await gateway.chat(**grammar, headers={"X-Turn-Type": "side"})
        [exchange] = await gateway.recorded(ExchangeCompleted)
    assert (response.status, response.body["error"]["code"]) == (400, "unsupported_value")
    assert "samples.off_distribution = gateway_override" in response.body["error"]["message"]
    assert (side.status, exchange.sampling.of_the_policy) == (200, False)
