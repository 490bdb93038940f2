"""Messages say the same when a client has rewritten how they say it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.conversation.messages import (
    dump,
    is_ephemeral,
    meaning,
    normal_call_id,
    parse,
    same_answer,
    text_of,
    tool_calls_of,
)
from clawstream.errors import UnusableExchange
from tests import recorded
from tests.sessions import Json, assistant, user

TEXTS = st.text(st.characters(codec=None, exclude_categories=()))


@given(TEXTS)
def test_any_text_survives_writing_and_reading_lone_surrogates_included(text: str) -> None:
    assert parse(dump(user(text))) == user(text)


@given(TEXTS, st.sampled_from(["", " ", "\n\t"]))
def test_an_answer_is_the_same_as_its_echo_in_parts_with_other_white_space(text: str, space: str) -> None:
    echo = {"role": "assistant", "content": [{"type": "text", "text": space + text}, {"type": "text", "text": space}]}
    assert same_answer(assistant(text), echo)


@given(TEXTS, TEXTS)
def test_two_answers_are_the_same_only_when_their_words_are(left: str, right: str) -> None:
    assert same_answer(assistant(left), assistant(right)) == (left.strip() == right.strip())


def test_tool_calls_are_the_same_by_name_and_arguments_whatever_their_ids_and_spacing() -> None:
    echo = recorded.TOOL_RESULTS[2]
    assert same_answer(recorded.LOOKING, echo)
    assert [call.call_id for call in tool_calls_of(recorded.LOOKING)] == ["call1", "call2"]
    assert not same_answer({**recorded.LOOKING, "tool_calls": recorded.LOOKING["tool_calls"][:1]}, echo)
    one, same = recorded.call("call1", '{"a":1,"b":2}'), recorded.call("call1", '{"b": 2, "a": 1}')
    assert same_answer({**recorded.LOOKING, "tool_calls": [one]}, {**echo, "tool_calls": [same]})
    other = [recorded.call("call1", '{"command": "rm"}'), *recorded.LOOKING["tool_calls"][1:]]
    assert not same_answer({**recorded.LOOKING, "tool_calls": other}, echo)


def test_arguments_that_are_no_json_compare_as_they_stand() -> None:
    def calling(arguments: str) -> Json:
        return {"role": "assistant", "content": None, "tool_calls": [recorded.call("c", arguments)]}

    assert same_answer(calling("{broken"), calling("{broken"))
    assert not same_answer(calling("{broken"), calling("{ broken"))
    assert same_answer(calling("[" * 100_000), calling("[" * 100_000))


def test_the_users_words_are_nobodys_echo() -> None:
    assert not same_answer(assistant("4"), user("4"))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (recorded.BLOCK, True),
        (user(f"\n{text_of(recorded.BLOCK)}\n"), True),
        (user(f"see {text_of(recorded.BLOCK)}"), False),
        (user("hello"), False),
        (assistant(text_of(recorded.BLOCK)), False),
        (recorded.SYSTEM, False),
    ],
)
def test_a_clients_own_block_is_nothing_but_that(message: Json, expected: bool) -> None:
    assert is_ephemeral(message) is expected


def test_developer_is_the_newer_name_of_system() -> None:
    assert meaning({"role": "developer", "content": "x"}) == meaning({"role": "system", "content": "x"})


def test_a_tool_result_belongs_to_its_call_however_the_id_is_written() -> None:
    def result(call_id: str) -> Json:
        return {"role": "tool", "content": "two", "tool_call_id": call_id}

    assert meaning(result("call_2")) == meaning(result("call2"))
    assert meaning(result("call_2")) != meaning(result("call_1"))
    assert normal_call_id("call-A_1") == "callA1"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b"\xff\xfe"])
def test_bytes_that_are_no_message_are_an_unusable_exchange(raw: bytes) -> None:
    with pytest.raises(UnusableExchange):
        parse(raw)


@pytest.mark.parametrize("content", [None, 3, [None, {"type": "image_url"}, {"text": 3}]])
def test_content_without_text_is_no_text(content: object) -> None:
    assert text_of(json.loads(json.dumps({"role": "user", "content": content}))) == ""
