"""Anthropic's form of a conversation as OpenAI's, and the answer's way back. Pure."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.conversation.messages import same_answer
from clawstream.events import FinishReason, Shaping
from clawstream.gateway.answering.deltas import ReplyDelta, ToolCall
from clawstream.gateway.answering.replies import Ending, Usage
from clawstream.gateway.dialects.anthropic import read_messages
from clawstream.gateway.dialects.anthropic_replies import (
    MessageReply,
    arguments_of,
    error_body,
    input_of,
    signature,
)
from clawstream.gateway.requests.fields import BadRequest

Json = dict[str, Any]
HELLO: list[Json] = [{"role": "user", "content": "Hello"}]
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)


def reply() -> MessageReply:
    return MessageReply(exchange_id="e", model="policy", prompt_tokens=7)


def ended(message: Json, reason: FinishReason) -> Ending:
    return Ending(message=message, reason=reason, usage=USAGE)


def asked(**fields: Any) -> Json:
    return {"model": "policy", "max_tokens": 10, "messages": HELLO} | fields


def messages_of(**fields: Any) -> list[Any]:
    return list(read_messages(asked(**fields)).messages)


def block(kind: str, **fields: Any) -> Json:
    return {"type": kind, **fields}


CALL = block("tool_use", id="toolu_1", name="exec", input={"command": "ls"})


def events_of(raw: bytes) -> list[Json]:
    found = []
    for event in raw.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    return found


def accumulated(events: list[Json]) -> Json:
    """The message that a client puts together."""
    message: Json = {}
    for event in events:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"partial": ""})
        elif event["type"] == "content_block_delta":
            grown, delta = message["content"][event["index"]], dict(event["delta"])
            assert event["index"] == len(message["content"]) - 1
            kind = delta.pop("type")
            ((key, piece),) = delta.items()
            key = {"input_json_delta": "partial"}.get(kind, key)
            grown[key] += piece
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for grown in message["content"]:
        partial = grown.pop("partial")
        if grown["type"] == "tool_use":
            grown["input"] = json.loads(partial)
    return message


def test_system_and_text_come_out_the_same_as_a_string_or_as_one_block() -> None:
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert messages_of(system="Be brief.") == expected
    as_blocks = [block("text", text="Be brief.", cache_control={"type": "ephemeral"})]
    said: list[Json] = [{"role": "user", "content": [block("text", text="Hello")]}]
    assert messages_of(system=as_blocks, messages=said) == expected


def test_a_system_message_stays_where_it_stands() -> None:
    said: list[Json] = [*HELLO, {"role": "system", "content": [block("text", text="It is late.")]}]
    assert messages_of(messages=said) == [*HELLO, {"role": "system", "content": "It is late."}]


def test_several_blocks_stay_parts() -> None:
    said: list[Json] = [{"role": "user", "content": [block("text", text="a"), block("text", text="b")]}]
    assert messages_of(messages=said)[0]["content"] == [block("text", text="a"), block("text", text="b")]


def test_results_of_parallel_calls_are_tool_messages_before_what_the_user_says() -> None:
    said: list[Json] = [
        *HELLO,
        {"role": "assistant", "content": [block("text", text="Look."), CALL, CALL | {"id": "toolu_2"}]},
        {
            "role": "user",
            "content": [
                block(
                    "tool_result", tool_use_id="toolu_2", content=[block("text", text="no "), block("text", text="x")]
                ),
                block("tool_result", tool_use_id="toolu_1", content="such file", is_error=True),
                block("text", text="And?"),
            ],
        },
    ]
    function = {"name": "exec", "arguments": '{"command": "ls"}'}
    assert messages_of(messages=said)[1:] == [
        {
            "role": "assistant",
            "content": "Look.",
            "tool_calls": [{"id": f"toolu_{at}", "type": "function", "function": function} for at in (1, 2)],
        },
        {"role": "tool", "tool_call_id": "toolu_2", "content": "no x"},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: such file"},
        {"role": "user", "content": "And?"},
    ]


def test_a_result_without_content_is_an_empty_tool_message() -> None:
    said = [*HELLO, {"role": "assistant", "content": [CALL]}]
    said.append({"role": "user", "content": [block("tool_result", tool_use_id="toolu_1")]})
    assert messages_of(messages=said)[1]["content"] is None
    assert messages_of(messages=said)[2] == {"role": "tool", "tool_call_id": "toolu_1", "content": ""}


def test_signed_thinking_is_taken_back_and_is_the_message_s_reasoning() -> None:
    thought = block("thinking", thinking="hm", signature=signature("hm"))
    said = [*HELLO, {"role": "assistant", "content": [thought, block("text", text="4")]}, *HELLO]
    assert messages_of(messages=said)[1] == {"role": "assistant", "content": "4", "reasoning_content": "hm"}


def test_thinking_that_another_model_signed_is_taken_as_it_is() -> None:
    thought = block("thinking", thinking="hm", signature="EqQBCgIYAhIM")
    said = [*HELLO, {"role": "assistant", "content": [thought]}, *HELLO]
    assert messages_of(messages=said)[1]["reasoning_content"] == "hm"


def test_tools_and_sampling_have_openai_s_names() -> None:
    tool = {"name": "exec", "description": "Runs.", "input_schema": {"type": "object"}, "cache_control": {}}
    request = read_messages(
        asked(
            tools=[tool], tool_choice={"type": "none"}, stop_sequences=["END"], top_k=5, top_p=0.5, temperature=1,
            stream=True, metadata={"user_id": "u", "session_id": "s", "run": "7"}, thinking={"type": "disabled"},
        )
    )  # fmt: skip
    function = {"name": "exec", "description": "Runs.", "parameters": {"type": "object"}}
    assert request.options["tools"] == [{"type": "function", "function": function}]
    assert request.options["tool_choice"] == "none"
    assert request.options["chat_template_kwargs"] == {"enable_thinking": False}
    assert request.options["metadata"] == {"run": "7"}
    assert (request.options["user"], request.session_id) == ("u", "s")
    assert (request.asked.stop, request.asked.top_k, request.asked.top_p) == (("END",), 5, 0.5)
    assert (request.asked.temperature, request.asked.max_tokens, request.asked.stream) == (1.0, 10, True)
    assert '"u"' in request.scope


@pytest.mark.parametrize(
    ("kind", "expected"), [("enabled", {"enable_thinking": True}), ("disabled", {"enable_thinking": False})]
)
def test_thinking_is_switched_in_the_template(kind: str, expected: Json) -> None:
    assert read_messages(asked(thinking={"type": kind})).options["chat_template_kwargs"] == expected


def test_adaptive_thinking_is_the_template_s_own() -> None:
    assert "chat_template_kwargs" not in read_messages(asked(thinking={"type": "adaptive"})).options


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "tool", "name": "x"}, {"tool_choice": {"type": "function", "function": {"name": "x"}}}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
    ],
    ids=json.dumps,
)
def test_what_is_to_be_called_is_said_in_openai_s_words(choice: Json, expected: Json) -> None:
    options = read_messages(asked(tool_choice=choice, tools=[{"name": "x", "input_schema": {}}])).options
    assert {key: options.get(key) for key in ("tool_choice", "parallel_tool_calls") if key in options} == expected


def test_a_session_ends_without_messages_or_max_tokens() -> None:
    request = read_messages({"model": "policy", "session_id": "s", "session_done": True})
    assert (request.messages, request.session_done) == ((), True)


REFUSED: dict[str, tuple[Json, str]] = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens is missing"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens is 0"),
    "no messages": ({"messages": []}, "messages is a list that is empty"),
    "an unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role is"),
    "a prefilled answer": ({"messages": [*HELLO, {"role": "assistant", "content": "It"}]}, "can't be prefilled"),
    "an image of nothing": (
        {"messages": [{"role": "user", "content": [block("image", source={})]}]},
        "source is an obj",
    ),
    "a document": (
        {"messages": [{"role": "user", "content": [block("document")]}]},
        "source is missing; expected the document",
    ),
    "a block without a type": ({"messages": [{"role": "user", "content": [{}]}]}, "not a content block"),
    "no content": ({"messages": [{"role": "user", "content": []}]}, "is a list that is empty"),
    "text before a result": (
        {"messages": [{"role": "user", "content": [block("text", text="a"), block("tool_result", tool_use_id="t")]}]},
        "come before all others",
    ),
    "a result of nothing": ({"messages": [{"role": "user", "content": [block("tool_result")]}]}, "tool_use_id is miss"),
    "redacted thinking": (
        {"messages": [*HELLO, {"role": "assistant", "content": [block("redacted_thinking", data="x")]}, *HELLO]},
        "only the model that wrote it can read",
    ),
    "changed thinking": (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [block("thinking", thinking="ha", signature=signature("hm"))]},
                *HELLO,
            ]
        },
        "changed after it was signed",
    ),
    "a call of nothing": ({"tool_choice": {"type": "any"}}, "there are no tools to call"),
    "a call of no name": ({"tool_choice": {"type": "tool"}}, "or tool with name"),
    "a switch that is none": (
        {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": {}}},
        "enable_thinking",
    ),
    "a limit that is no flag": ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "disable_parallel"),
    "a server tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "of the client's own"),
    "a tool without schema": ({"tools": [{"name": "x"}]}, r"tools\[0\].input_schema is missing"),
    "too hot": ({"temperature": 1.5}, "temperature is 1.5"),
    "an empty stop": ({"stop_sequences": [""]}, "stop_sequences"),
    "unknown thinking": ({"thinking": {"type": "between_tools"}}, "thinking.type is"),
    "thinking of no type": ({"thinking": {"type": []}}, "thinking.type is"),
    "thinking that says nothing": ({"thinking": {}}, "thinking.type is null"),
    "a choice that says nothing": ({"tool_choice": {}}, "tool_choice is {}"),
    "a system message of nothing": ({"messages": [{"role": "system", "content": []}]}, r"content is a list that is em"),
    "a failure that is no flag": (
        {"messages": [{"role": "user", "content": [block("tool_result", tool_use_id="t", is_error="no")]}]},
        "is_error is a string",
    ),
    "hidden thinking": ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    "a format without schema": (
        {"output_config": {"format": {"type": "json_schema"}}},
        'output_config.format is {"type": "json_schema"}; expected type json_schema, and schema as an object',
    ),
    "a format of no name": ({"output_config": {"format": {"type": "yaml", "schema": {}}}}, "expected type json_schema"),
    "a format that is a word": ({"output_config": {"format": "json"}}, "output_config.format is a string"),
    "a container": ({"container": "c"}, "container is not supported"),
    "long metadata": ({"metadata": {"k": "x" * 513}}, "metadata.k has 513 characters"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_can_t_be_done_is_refused_by_its_own_name(fields: Json, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read_messages(asked(**fields))


def test_a_format_is_a_grammar_in_openai_s_form_and_the_effort_is_recorded() -> None:
    schema = {"type": "object", "properties": {"total": {"type": "integer"}}}
    shape = {"type": "json_schema", "schema": schema}
    chat = read_messages(asked(output_config={"effort": "low", "format": shape}))
    assert chat.asked.shaping == Shaping(json_schema=json.dumps(schema, separators=(",", ":")))
    assert chat.options["response_format"] == {"type": "json_schema", "json_schema": {"schema": schema}}
    assert chat.options["output_config"] == {"effort": "low"}
    unshaped = read_messages(asked(output_config={"format": None}))
    assert (unshaped.asked.shaping, "output_config" in unshaped.options) == (None, False)


TEXT = st.text(min_size=1, max_size=8)
CALLS = st.builds(
    lambda name, arguments: ToolCall(index=0, call_id="call1", name=name, arguments=arguments),
    TEXT,
    st.one_of(st.dictionaries(TEXT, TEXT, max_size=2).map(json.dumps), TEXT),
)
DELTAS = st.lists(
    st.one_of(
        st.builds(lambda text: ReplyDelta(reasoning=text), TEXT),
        st.builds(lambda text: ReplyDelta(content=text), TEXT),
        st.builds(lambda one, two: ReplyDelta(reasoning=one, content=two), TEXT, TEXT),
    ),
    max_size=6,
)


@pytest.mark.slow
@given(DELTAS, st.lists(CALLS, max_size=2))
def test_any_stream_adds_up_to_an_answer_that_is_recognised_when_it_comes_back(
    deltas: list[ReplyDelta], calls: list[ToolCall]
) -> None:
    events = reply()
    raw = b"".join([*map(events.delta, deltas), events.delta(ReplyDelta(tool_calls=tuple(calls)))] if calls else
                   [*map(events.delta, deltas)])  # fmt: skip
    raw += events.finish(ended({}, FinishReason.STOP))
    answer: Json = {
        "role": "assistant",
        "content": "".join(delta.content for delta in deltas),
        "reasoning_content": "".join(delta.reasoning for delta in deltas),
        "tool_calls": [call.as_dict() for call in calls],
    }
    got = accumulated(events_of(raw))
    (_, echo, _) = messages_of(messages=[*HELLO, {"role": "assistant", "content": got["content"]}, *HELLO])
    assert same_answer(answer, echo)
    assert echo.get("reasoning_content", "") == answer["reasoning_content"]
    whole = json.loads(reply().whole(ended(answer, FinishReason.STOP)))
    (_, again, _) = messages_of(messages=[*HELLO, {"role": "assistant", "content": whole["content"]}, *HELLO])
    assert again == echo


def test_a_stream_has_a_block_for_each_kind_and_ends_once() -> None:
    events = reply()
    call = ToolCall(index=0, call_id="call1", name="exec", arguments='{"command": "ls"}')
    raw = (
        events.start()
        + events.start()
        + events.delta(ReplyDelta(reasoning="h"))
        + events.delta(ReplyDelta(reasoning="m"))
    )
    raw += events.delta(ReplyDelta(content="Look.")) + events.delta(ReplyDelta(tool_calls=(call, call)))
    before = events_of(raw)
    assert not [event for event in before if event["type"] in ("message_delta", "message_stop")]
    found = before + events_of(events.finish(ended({}, FinishReason.TOOL_CALLS)))
    assert [event["type"].removeprefix("content_block_") for event in found] == [
        "message_start", "ping",
        "start", "delta", "delta", "delta", "stop",
        "start", "delta", "stop",
        "start", "delta", "stop",
        "start", "delta", "stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert found[0]["message"]["usage"] == {"input_tokens": 7, "output_tokens": 0}
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"] == {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 3}


@pytest.mark.parametrize("arguments", ['{"a": "é"}', "[1]", "{oops", '{"arguments_that_are_no_object": "x", "b": 1}'])
def test_a_call_s_arguments_come_back_as_they_were_sampled(arguments: str) -> None:
    assert arguments_of(input_of(arguments)) == arguments


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        (None, {"input_tokens": 7}),
        (0, {"input_tokens": 7, "cache_read_input_tokens": 0}),
        (4, {"input_tokens": 3, "cache_read_input_tokens": 4}),
    ],
)
def test_what_was_read_from_a_cache_is_counted_apart_where_the_engine_says_it(
    cached: int | None, expected: dict[str, int]
) -> None:
    usage = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=cached)
    whole = json.loads(reply().whole(Ending(message={"content": "x"}, reason=FinishReason.STOP, usage=usage)))
    assert whole["usage"] == expected | {"output_tokens": 3}


@pytest.mark.parametrize(
    ("reason", "matched", "expected"),
    [
        (FinishReason.STOP, None, ("end_turn", None)),
        (FinishReason.STOP, "END", ("stop_sequence", "END")),
        (FinishReason.LENGTH, None, ("max_tokens", None)),
        (FinishReason.TOOL_CALLS, "END", ("tool_use", None)),
    ],
)
def test_how_an_answer_ended_is_said_in_anthropic_s_words(
    reason: FinishReason, matched: str | None, expected: tuple[str, str | None]
) -> None:
    ending = Ending(message={"content": "x"}, reason=reason, usage=USAGE, matched_stop=matched)
    whole = json.loads(reply().whole(ending))
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "not_found_error"), (413, "request_too_large"), (422, "invalid_request_error"),
        (429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error"),
    ],
)  # fmt: skip
def test_each_status_has_anthropic_s_type_of_error(status: int, kind: str) -> None:
    body = json.loads(error_body(BadRequest("No.", status=status)))
    assert body == {"type": "error", "error": {"type": kind, "message": "No."}}
