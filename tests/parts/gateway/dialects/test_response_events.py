"""The stream of a response is whole for clients that listen to the ends of its pieces alone."""

from clawstream.events import FinishReason
from clawstream.gateway.answering.deltas import ReplyDelta, ToolCall
from tests.parts.gateway.dialects.test_responses import CUSTOM, FUNCTION, ended, events_of, reply


def test_each_piece_that_grew_ends_as_a_whole_before_its_item_does() -> None:
    growing = reply(tools=[FUNCTION, CUSTOM])
    call = ToolCall(index=0, call_id="c0", name="exec", arguments="{}")
    raw = growing.delta(ReplyDelta(reasoning="h")) + growing.delta(ReplyDelta(reasoning="m", content="It "))
    raw += growing.delta(ReplyDelta(content="is 4.", tool_calls=(call,)))
    events = events_of(raw + growing.finish(ended({}, FinishReason.TOOL_CALLS)))[2:-1]
    assert [event["type"].removeprefix("response.") for event in events] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    ends = {event["type"].removeprefix("response."): event for event in events if event["type"].endswith(".done")}
    assert (ends["reasoning_text.done"]["text"], ends["output_text.done"]["text"]) == ("hm", "It is 4.")
    assert (ends["function_call_arguments.done"]["arguments"], events[-2]["name"]) == ("{}", "exec")
    assert [event["output_index"] for event in events] == [0] * 7 + [1] * 7 + [2] * 4
