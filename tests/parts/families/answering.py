"""An answer fed to the gateway's stream, and what every answer has to keep, whatever the family and the text."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from clawstream.gateway.answering.deltas import AnswerStream, ReplyDelta
from clawstream.rendering.renderer import PromptRenderer
from tests.parts.families.formats import TOOLS, Call

QUESTION = ({"role": "user", "content": "What is the weather in Paris?"},)


def names(of: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize a test by format; GPT-OSS's vocabulary comes with SGLang."""
    slow = (pytest.mark.sglang, pytest.mark.timeout(900))
    return pytest.mark.parametrize("name", [pytest.param(name, marks=slow * (name == "gpt-oss")) for name in of])


def stream(
    renderer: PromptRenderer,
    ids: Sequence[int],
    cuts: Sequence[int] = (1,),
    options: Mapping[str, Any] | None = None,
) -> tuple[AnswerStream, list[ReplyDelta]]:
    """Feed `ids` in chunks of `cuts` tokens, over and over, and return the stream and what it gave."""
    options = {"tools": TOOLS} if options is None else options
    answer = AnswerStream(
        renderer=renderer,
        prompt_ids=renderer.prompt_ids(QUESTION, options),
        options=options,
        exchange_id="11111111-2222-3333-4444-555555555555",
    )
    deltas, at, turn = [], 0, 0
    while at < len(ids):
        size = cuts[turn % len(cuts)]
        deltas.append(answer.feed(ids[at : at + size]))
        at, turn = at + size, turn + 1
    deltas.append(answer.finish())
    return answer, [delta for delta in deltas if delta is not None]


def kept(
    renderer: PromptRenderer, ids: Sequence[int], cuts: Sequence[int], options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the message, after checking that the stream adds up to it and that any other cutting gives it, too."""
    answer, deltas = stream(renderer, ids, cuts, options)
    message = answer.message()
    assert "".join(delta.content for delta in deltas) == (message["content"] or "")
    assert "".join(delta.reasoning for delta in deltas) == message.get("reasoning_content", "")
    streamed = [call for delta in deltas for call in delta.as_dict().get("tool_calls", [])]
    assert [call.pop("index") for call in streamed] == list(range(len(streamed)))
    assert streamed == message.get("tool_calls", [])
    assert len({call["id"] for call in streamed}) == len(streamed)
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in streamed)
    assert message == stream(renderer, ids, (len(ids) + 1,), options)[0].message()
    return message


def called(message: Mapping[str, Any]) -> list[Call]:
    """Return names and arguments of a message's calls."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]
