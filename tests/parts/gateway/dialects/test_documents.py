"""Documents for a policy that reads text: one that is text becomes that, any other becomes words that say so."""

import base64
import json
from typing import Any

import pytest

from clawstream.gateway.dialects.anthropic import read_messages
from clawstream.gateway.dialects.responses import read_responses
from clawstream.gateway.requests.fields import BadRequest
from clawstream.gateway.requests.wire import read_request

Json = dict[str, Any]
PDF = base64.b64encode(b"%PDF-1.7 secret").decode()
TEXT = base64.b64encode("Größe: 4".encode()).decode()
BY_USER = "(document omitted: model does not support documents)"
BY_TOOL = "(tool document omitted: model does not support documents)"
ASK: Json = {"type": "text", "text": "What is it?"}


def chat(part: Json) -> Any:
    """What a user's part becomes in Chat Completions."""
    return read_request({"messages": [{"role": "user", "content": [part, ASK]}]}).messages[0]["content"][0]["text"]


def responses(part: Json) -> Any:
    """What it becomes in the Responses API."""
    content = [part, {"type": "input_text", "text": "What is it?"}]
    body = {"input": [{"role": "user", "content": content}]}
    request = read_responses(body, False, lambda _: None)
    return request.messages[0]["content"][0]["text"]


def anthropic(source: Json) -> Any:
    """What a document with this source becomes in the Messages API."""
    content = [{"type": "document", "source": source, "title": "a"}, ASK]
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    return read_messages(body).messages[0]["content"][0]["text"]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}, BY_USER),
        ({"filename": "a.pdf", "file_data": PDF}, BY_USER),
        ({"file_id": "file-1"}, BY_USER),
        ({"filename": "a.txt", "file_data": f"data:text/plain;base64,{TEXT}"}, "Größe: 4"),
        ({"filename": "a.txt", "file_data": f"data:text/plain;charset=utf-8;base64,{TEXT}"}, "Größe: 4"),
    ],
)
def test_a_file_of_openai_s_is_its_text_or_words_by_both_apis(held: Json, expected: str) -> None:
    assert chat({"type": "file", "file": held}) == expected
    assert responses({"type": "input_file", **held}) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"type": "base64", "media_type": "application/pdf", "data": PDF}, BY_USER),
        ({"type": "url", "url": "https://example.org/a.pdf"}, BY_USER),
        ({"type": "file", "file_id": "file_1"}, BY_USER),
        ({"type": "text", "media_type": "text/plain", "data": "Größe: 4"}, "Größe: 4"),
        ({"type": "base64", "media_type": "text/plain", "data": TEXT}, "Größe: 4"),
        ({"type": "content", "content": "Größe: 4"}, "Größe: 4"),
        (
            {"type": "content", "content": [{"type": "text", "text": "Größe: "}, {"type": "text", "text": "4"}]},
            "Größe: 4",
        ),
    ],
    ids=json.dumps,
)
def test_a_document_of_anthropic_s_is_its_text_or_words(source: Json, expected: str) -> None:
    assert anthropic(source) == expected


def test_a_tool_s_document_is_the_tool_s() -> None:
    document = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [document]}
    call = {"type": "tool_use", "id": "c", "name": "Read", "input": {}}
    said: list[Json] = [
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    assert read_messages({"max_tokens": 1, "messages": said}).messages[-1]["content"] == BY_TOOL


@pytest.mark.parametrize("data", ["data:text/plain;base64,%%", "data:text/plain;base64,/w=="])
def test_text_that_can_t_be_read_is_refused_in_words(data: str) -> None:
    with pytest.raises(BadRequest, match="no text in UTF-8"):
        chat({"type": "file", "file": {"file_data": data}})


@pytest.mark.parametrize("content", [None, [{"type": "document"}], [3]])
def test_a_document_of_blocks_that_are_none_is_refused_in_words(content: object) -> None:
    with pytest.raises(BadRequest, match="expected a string, or blocks"):
        anthropic({"type": "content", "content": content})
