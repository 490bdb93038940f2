"""The Responses API's form of a conversation as that of Chat Completions, and the answer's way back. Pure."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.conversation.messages import dump, same_answer
from clawstream.events import FinishReason
from clawstream.gateway.answering.deltas import ReplyDelta, ToolCall
from clawstream.gateway.answering.replies import Ending, Usage
from clawstream.gateway.dialects.responses import conversation_of, read_responses
from clawstream.gateway.dialects.responses_replies import ResponseReply
from clawstream.gateway.dialects.responses_tools import custom_arguments, custom_input, sealed
from clawstream.gateway.requests.fields import BadRequest, TooLong
from clawstream.gateway.requests.wire import read_request
from clawstream.gateway.sessions import Conversations, RecalledResponse

Json = dict[str, Any]
ONE, TWO = "0" * 8 + "-0000-4000-8000-" + "0" * 12, "1" * 8 + "-0000-4000-8000-" + "0" * 12
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)


def ended(message: Json, reason: FinishReason) -> Ending:
    return Ending(message=message, reason=reason, usage=USAGE)


FUNCTION = {"type": "function", "name": "exec", "description": "Runs.", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "text"}}
WITHIN = {"type": "namespace", "name": "agents", "description": "Others.", "tools": [FUNCTION | {"name": "spawn"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "exec", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "a.txt"}


def nobody(_exchange_id: str) -> None:
    return None


def item(kind: str, **fields: Any) -> Json:
    return {"type": kind, **fields}


def said(role: str, text: str, **more: Any) -> Json:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **more}


def messages_of(*items: Json, **fields: Any) -> list[Any]:
    return list(read_responses({"input": list(items), **fields}, False, nobody).messages)


def options_of(**fields: Any) -> Any:
    return read_responses({"input": "Hi", **fields}, False, nobody).options


def reply(**options: Any) -> ResponseReply:
    return ResponseReply(
        exchange_id=ONE,
        model="policy",
        created_s=1,
        options=read_responses({"input": "Hi", **options}, False, nobody).options,
    )


def events_of(raw: bytes) -> list[Json]:
    found = []
    for event in raw.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_text_instructions_and_parts_are_the_messages_of_chat_completions() -> None:
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert list(read_responses({"input": "Hello", "instructions": "Be brief."}, False, nobody).messages) == expected
    assert messages_of(said("user", "Hello"), instructions="Be brief.") == expected
    assert messages_of({"role": "user", "content": "Hello"}, instructions="Be brief.") == expected
    assert messages_of(said("developer", "Be kind."))[0] == {"role": "developer", "content": "Be kind."}


def test_reasoning_text_and_calls_of_one_answer_are_one_message() -> None:
    thought = item("reasoning", id="rs_1", summary=[], content=[{"type": "reasoning_text", "text": "hm"}])
    found = messages_of(said("user", "ls"), thought, said("assistant", "Look."), CALL, CALL | {"call_id": "c2"}, RESULT)
    function = {"name": "exec", "arguments": "{}"}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ("c1", "c2")]
    assert found[1:] == [
        {"role": "assistant", "content": "Look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
    ]


def test_two_answers_in_a_row_stay_two_and_one_that_thought_twice_stays_one() -> None:
    twice = [said("assistant", "A"), said("assistant", "B"), said("user", "?")]
    assert [message["content"] for message in messages_of(*twice)] == ["A", "B", "?"]
    ours = [said("assistant", "A", id=f"msg_{ONE}"), said("assistant", "B", id=f"msg_{ONE}_1"), said("user", "?")]
    assert [message["content"] for message in messages_of(*ours)] == ["AB", "?"]
    others = [said("assistant", "A", id=f"msg_{ONE}"), CALL | {"id": f"fc_{TWO}_0"}, RESULT]
    assert [message["content"] for message in messages_of(*others)] == ["A", None, "a.txt"]


def test_a_result_s_picture_is_words_in_its_place() -> None:
    shown = RESULT | {"output": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}
    assert "image omitted" in messages_of(said("user", "Look."), CALL, shown)[-1]["content"][0]["text"]


def test_sealed_reasoning_comes_back_as_it_was_thought() -> None:
    thought = item("reasoning", summary=[], encrypted_content=sealed("hm \ud83d"))
    assert messages_of(thought, said("assistant", "4"), said("user", "?"))[0]["reasoning_content"] == "hm \ud83d"


def test_tools_are_functions_and_the_client_s_own_forms_are_remembered() -> None:
    options = options_of(tools=[FUNCTION, CUSTOM, WITHIN], tool_choice="auto", max_output_tokens=5, top_p=0.5)
    exec_, patch, spawn = (tool["function"] for tool in options["tools"])
    assert exec_ == {"name": "exec", "description": "Runs.", "parameters": {"type": "object"}}
    assert (patch["name"], patch["parameters"]["required"]) == ("patch", ["input"])
    assert spawn["name"] == "agents__spawn"
    assert options["responses"] == {
        "instructed": False,
        "custom": ["patch"],
        "namespaced": {"agents__spawn": ["agents", "spawn"]},
    }
    asked = read_responses({"input": "Hi", "max_output_tokens": 5, "top_p": 0.5}, False, nobody).asked
    assert (asked.max_tokens, asked.top_p) == (5, 0.5)


def test_tools_that_alone_are_allowed_are_offered_alone() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]}
    options = options_of(tools=[FUNCTION, CUSTOM], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in options["tools"]] == ["patch"]
    assert options["tool_choice"] == "required"
    with pytest.raises(BadRequest, match=r"allowed_tools names 'x', which is none of the tools"):
        options_of(tools=[FUNCTION], tool_choice=allowed | {"tools": [{"type": "function", "name": "x"}]})
    with pytest.raises(BadRequest, match=r"tools\[0\] is not a function with a name"):
        options_of(tools=[FUNCTION], tool_choice=allowed | {"tools": [{"type": "mcp", "server_label": "x"}]})


def test_structured_output_is_the_same_grammar_as_in_chat_completions() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number"}}}
    shape = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    ours = read_responses({"input": "Hi", "text": {"format": shape}}, False, nobody).asked.shaping
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    theirs = read_request({"messages": [{"role": "user", "content": "Hi"}], "response_format": wrapped}).asked.shaping
    assert ours == theirs
    assert ours is not None
    assert read_responses({"input": "Hi", "text": {"format": {"type": "text"}}}, False, nobody).asked.shaping is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input is missing"),
        ({"input": []}, "input is a list that is empty"),
        ({"input": [{"type": "web_search_call"}]}, r"input\[0\] is a 'web_search_call' item"),
        ({"input": [{"role": "tool", "content": "x"}]}, r'input\[0\].role is "tool"'),
        ({"input": [CALL | {"call_id": None}]}, r"input\[0\].call_id is missing"),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, r'tools\[0\] is a "web_search" tool'),
        ({"input": "Hi", "text": {"format": {}}}, "text.format.type is null"),
        ({"input": "Hi", "tool_choice": {}}, "tool_choice"),
        ({"input": "Hi", "background": True}, "background is not supported"),
        ({"input": "Hi", "conversation": "conv_1"}, "conversation is not supported"),
        ({"input": "Hi", "truncation": "auto"}, "truncation is not supported"),
        ({"input": "Hi", "previous_response_id": f"resp_{ONE}"}, "send the conversation in input|not found"),
        ({"input": [item("item_reference", id=f"msg_{ONE}")]}, "no item that this gateway remembers"),
        ({"input": [item("reasoning", summary=[], encrypted_content="gAAAA")]}, "another model encrypted"),
        ({"input": [item("reasoning", encrypted_content=sealed("hm") + "!")]}, "was changed since it was sent"),
        ({"input": [said("assistant", "A") | {"content": [{"type": "input_image"}]}]}, "an answer is text"),
    ],
)
def test_what_is_not_there_is_refused_by_its_name(body: Json, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        read_responses(body, False, nobody)


def test_a_server_s_tool_that_codex_offers_unasked_is_left_out() -> None:
    codex = {"client_metadata": {"session_id": "s"}, "tools": [FUNCTION, {"type": "web_search"}]}
    options = options_of(**codex)
    assert [tool["function"]["name"] for tool in options["tools"]] == ["exec"]
    assert "client_metadata" not in options


def test_a_response_s_id_stands_for_what_was_said_without_its_instructions() -> None:
    messages = (dump({"role": "system", "content": "Be brief."}), dump({"role": "user", "content": "Hello"}))
    known = Conversations(1000)
    before = conversation_of(messages, options_of(instructions="Be brief."))
    assert before is not None
    answer = dump({"role": "assistant", "content": "Hi."})
    known.answered(ONE, session_id="s", key_name="mine", before=before, answer=answer, at_ms=0)

    def recall(exchange_id: str) -> RecalledResponse | None:
        return known.recall(exchange_id, "mine")

    body = {"input": "Why?", "instructions": "Be kind.", "previous_response_id": f"resp_{ONE}"}
    chat = read_responses(body, False, recall)
    assert [message["content"] for message in chat.messages] == ["Be kind.", "Hello", "Hi.", "Why?"]
    assert chat.session_id == "s"
    assert known.recall(ONE, "another") is None
    by_item = read_responses({"input": [item("item_reference", id=f"msg_{ONE}"), said("user", "?")]}, False, recall)
    assert by_item.messages[0] == {"role": "assistant", "content": "Hi."}


def test_references_to_the_items_of_one_answer_are_that_answer() -> None:
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "exec", "arguments": "{}"}} for n in (0, 1)]
    answer = {"role": "assistant", "content": "Look.", "reasoning_content": "hm", "tool_calls": calls}
    recalled = RecalledResponse(session_id="s", before=(), answer=answer)
    ids = (f"rs_{ONE}", f"msg_{ONE}", f"fc_{ONE}_0", f"fc_{ONE}_1", f"msg_{ONE}_1")
    items = [item("item_reference", id=one) for one in ids]
    chat = read_responses({"input": [*items, RESULT]}, False, lambda _id: recalled)
    assert chat.messages[0] == answer


def test_what_is_not_to_be_stored_is_not_and_chat_completions_never_are() -> None:
    assert conversation_of((b"{}",), options_of(store=False)) is None
    assert conversation_of((b"{}",), {}) is None


def test_what_is_too_much_or_too_old_is_forgotten_oldest_first() -> None:
    known = Conversations(10, max_bytes=8)
    for number, at_ms in enumerate((0, 0, 11)):
        known.answered(str(number), session_id="s", key_name=None, before=(b"{}",), answer=b"{}", at_ms=at_ms)
        assert len(known) == (1, 2, 1)[number]
    known.answered("3", session_id="s", key_name=None, before=(b"{}",) * 2, answer=b"{}", at_ms=11)
    assert known.recall("2", None) is None
    assert known.recall("3", None) is not None


def test_the_events_add_up_to_the_response_that_ends_them() -> None:
    growing = reply(tools=[FUNCTION, CUSTOM, WITHIN], include=["reasoning.encrypted_content"])
    calls = tuple(
        ToolCall(index=at, call_id=f"c{at}", name=name, arguments=arguments)
        for at, (name, arguments) in enumerate(
            [("exec", "{}"), ("patch", custom_arguments("*** Begin")), ("agents__spawn", "{}")]
        )
    )
    raw = growing.start() + growing.delta(ReplyDelta(reasoning="h")) + growing.delta(ReplyDelta(reasoning="m"))
    raw += growing.delta(ReplyDelta(content="It ")) + growing.delta(ReplyDelta(content="is 4.", tool_calls=calls))
    events = events_of(raw + growing.finish(ended({}, FinishReason.TOOL_CALLS)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    whole = events[-1]["response"]
    assert (kinds[-1], whole["status"], whole["usage"]["total_tokens"]) == ("response.completed", "completed", 10)
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]
    thought, message, exec_, patch, spawn = whole["output"]
    assert (thought["content"][0]["text"], thought["encrypted_content"]) == ("hm", sealed("hm"))
    assert message["content"][0]["text"] == "It is 4."
    assert (exec_["type"], exec_["arguments"], exec_["call_id"]) == ("function_call", "{}", "c0")
    assert (patch["type"], patch["input"]) == ("custom_tool_call", "*** Begin")
    assert (spawn["namespace"], spawn["name"]) == ("agents", "spawn")
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert deltas == ["It ", "is 4."]
    plain = reply(tools=[FUNCTION, CUSTOM, WITHIN], include=["reasoning.encrypted_content"])
    recorded: Json = {"role": "assistant", "content": "It is 4.", "reasoning_content": "hm"}
    recorded["tool_calls"] = [call.as_dict() for call in calls]
    assert json.loads(plain.whole(ended(recorded, FinishReason.TOOL_CALLS))) == whole


def test_an_answer_that_was_cut_short_is_incomplete_and_says_why() -> None:
    growing = reply()
    raw = growing.delta(ReplyDelta(content="It"))
    (*_, last) = events_of(raw + growing.finish(ended({}, FinishReason.LENGTH)))
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (BadRequest("Away.", status=503), "server_error"),
        (TooLong("it is long", 7), "context_length_exceeded"),
        (BadRequest("Odd.", status=422), "invalid_prompt"),
    ],
)
def test_a_stream_that_breaks_off_ends_with_response_failed(refused: BadRequest, code: str) -> None:
    growing = reply()
    *before, last = events_of(growing.delta(ReplyDelta(content="It")) + growing.fail(refused))
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": code, "message": str(refused)}
    assert {event["type"] for event in before}.isdisjoint({"response.completed", "response.output_item.done"})


@given(text=st.text(), thought=st.text(), calls=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3))
def test_an_answer_comes_back_as_the_message_that_is_recorded(text: str, thought: str, calls: list[str]) -> None:
    message: Json = {"role": "assistant", "content": text or None, "reasoning_content": thought}
    message["tool_calls"] = [
        ToolCall(index=at, call_id=f"c{at}", name=name, arguments="{}").as_dict() for at, name in enumerate(calls)
    ]
    output = json.loads(reply().whole(ended(message, FinishReason.STOP)))["output"]
    (echo, *_) = messages_of(*output, said("user", "?"))
    assert same_answer(message, echo)
    assert (echo.get("reasoning_content") or "") == thought


@given(text=st.text())
def test_bare_text_survives_as_a_function_s_arguments(text: str) -> None:
    assert custom_input(custom_arguments(text)) == text
