"""The real `anthropic` package against the gateway."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageParam, ToolParam
from pydantic import BaseModel

from clawstream.events import ExchangeCompleted, ExchangeFailed, FailureReason, SessionDone
from clawstream.gateway.http.connection import Bounds
from clawstream.rendering.renderer import PromptRenderer
from tests.fakes.scripted_engine import Fault
from tests.parts.gateway.outbox.test_promises import GatedLog
from tests.parts.gateway.running_gateway import WITHIN_S, RunningGateway, full_disk, running_gateway
from tests.system.clients.conftest import TOTAL
from tests.system.clients.turns import paired

CALL = '<tool_call>\n{{"name": "exec", "arguments": {{"command": "{}"}}}}\n</tool_call>'
TOOL: ToolParam = {
    "name": "exec",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}


class Sum(BaseModel):
    total: int


HELLO: list[MessageParam] = [{"role": "user", "content": "What is 2+2?"}]


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as found:
        yield found


async def ask(client: anthropic.AsyncAnthropic, messages: list[MessageParam], *, stream: bool, **more: Any) -> Message:
    """The final message, asked for either way."""
    if not stream:
        whole: Message = await client.messages.create(model="policy", max_tokens=200, messages=messages, **more)
        return whole
    async with client.messages.stream(model="policy", max_tokens=200, messages=messages, **more) as found:
        return await found.get_final_message()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_is_a_message_and_an_exchange_in_openai_s_form(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic, stream: bool
) -> None:
    message = await ask(client, HELLO, stream=stream, system="Be brief.", extra_headers={"X-Session-Id": "s1"})
    exchange = await gateway.exchange()
    assert message.id == f"msg_{exchange.exchange_id}"
    assert stream or message._request_id == f"req_{exchange.exchange_id}"
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "It is 4."}]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "policy")
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(exchange.request.token_ids)
    assert usage.output_tokens == len(exchange.output_ids)
    assert [json.loads(said) for said in exchange.request.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2+2?"},
    ]
    assert json.loads(exchange.message) == {"role": "assistant", "content": "It is 4."}
    assert exchange.session_id == "s1"


async def test_the_sync_client_streams_text(gateway: RunningGateway) -> None:
    def said() -> str:
        with (
            anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client,
            client.messages.stream(model="policy", max_tokens=20, messages=HELLO) as stream,
        ):
            return "".join(stream.text_stream)

    assert await asyncio.to_thread(said) == "It is 4."


@pytest.mark.parametrize("stream", [True, False])
async def test_tools_and_thinking_go_round_and_every_turn_is_paired(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic, stream: bool
) -> None:
    gateway.say(f"<think>\nTwo folders.\n</think>\n\nLook. {CALL.format('ls a')}\n{CALL.format('ls b')}")
    history: list[MessageParam] = [*HELLO]
    tools: dict[str, Any] = {"tools": [TOOL], "stream": stream}
    first = await ask(client, history, **tools)
    thinking, text, *calls = first.content
    assert (thinking.type, text.type, first.stop_reason) == ("thinking", "text", "tool_use")
    assert thinking.type == "thinking"
    assert (thinking.thinking, thinking.signature[:11]) == ("Two folders.", "clawstream-")
    assert [call.input for call in calls if call.type == "tool_use"] == [{"command": "ls a"}, {"command": "ls b"}]
    gateway.say("Both are empty.")
    results: Any = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "none"}]}
        for call in calls
        if call.type == "tool_use"
    ]
    history += [first.to_param(), {"role": "user", "content": results}]
    second = await ask(client, history, **tools)
    history += [second.to_param(), {"role": "user", "content": "Thanks."}]
    await ask(client, history, **tools)
    one, two, three = exchanges = await gateway.recorded(ExchangeCompleted, at_least=3)
    assert one.session_id == two.session_id == three.session_id
    assert [turn.turn_id for turn in paired(exchanges)] == [one.exchange_id, two.exchange_id]
    assert [len(turn.next_state) for turn in paired(exchanges)] == [2, 1]
    assert two.request.kept_messages == 1
    assert json.loads(two.request.messages[0])["reasoning_content"] == "Two folders."


async def test_the_stream_helper_sees_thinking_text_and_input_as_they_grow(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic
) -> None:
    gateway.say(f"<think>\nhm\n</think>\n\nLook. {CALL.format('ls')}")
    async with client.messages.stream(model="policy", max_tokens=200, messages=HELLO, tools=[TOOL]) as stream:
        kinds = [event.type async for event in stream]
    assert kinds[0] == "message_start"
    # Tokens that arrive together are one delta.
    assert 1 <= kinds.count("thinking") <= len("hm")
    assert 1 <= kinds.count("text") <= len("Look.")
    assert kinds.count("input_json") == kinds.count("signature") == 1
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert kinds[-2:] == ["message_delta", "message_stop"]


async def test_thinking_can_be_switched_off(gateway: RunningGateway, client: anthropic.AsyncAnthropic) -> None:
    await ask(client, HELLO, stream=False, thinking={"type": "disabled"})
    exchange = await gateway.exchange()
    assert gateway.renderer.decode(exchange.request.token_ids).endswith("<think>\n\n</think>\n\n")


@pytest.mark.slow
async def test_an_answer_by_a_schema_is_parsed(roomy: RunningGateway) -> None:
    async with anthropic.AsyncAnthropic(base_url=roomy.url, api_key="none", max_retries=0) as client:
        said: list[MessageParam] = [{"role": "user", "content": "What is 2+2? Say it as JSON."}]
        message = await client.messages.parse(model="policy", max_tokens=200, messages=said, output_format=Sum)
        async with client.messages.stream(model="policy", max_tokens=200, messages=said, output_format=Sum) as stream:
            streamed = await stream.get_final_message()
    assert message.parsed_output == streamed.parsed_output == Sum(**TOTAL)
    [one, two] = [call.request.sampling.shaping for call in roomy.engine.calls]
    assert one is not None
    assert one.json_schema is not None
    assert (json.loads(one.json_schema)["required"], two) == (["total"], one)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_sequence_is_named(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic, stream: bool
) -> None:
    gateway.say("one two three")
    message = await ask(client, HELLO, stream=stream, stop_sequences=["four", "three"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "three")
    assert message.content[0].to_dict()["text"] == "one two "


@pytest.mark.parametrize("stream", [True, False])
async def test_an_empty_answer_is_a_message_without_content(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic, stream: bool
) -> None:
    gateway.say("")
    message = await ask(client, HELLO, stream=stream)
    assert (message.content, message.stop_reason) == ([], "end_turn")
    later: list[MessageParam] = [*HELLO, message.to_param(), {"role": "user", "content": "Well?"}]
    await ask(client, later, stream=stream)
    assert len(paired(await gateway.recorded(ExchangeCompleted, at_least=2))) == 1


async def test_max_tokens_end_an_answer(client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(model="policy", max_tokens=2, messages=HELLO)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


async def test_tokens_are_counted_as_the_prompt_has_them(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic
) -> None:
    counted = await client.messages.count_tokens(model="policy", messages=HELLO, system="Be brief.", tools=[TOOL])
    assert gateway.engine.calls == []
    await ask(client, HELLO, stream=False, system="Be brief.", tools=[TOOL])
    assert counted.input_tokens == len((await gateway.exchange()).request.token_ids)
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.count_tokens(model="claude", messages=HELLO)
    robot: Any = {"role": "robot", "content": ""}
    with pytest.raises(anthropic.BadRequestError, match="expected one of user"):
        await client.messages.count_tokens(model="policy", messages=[robot])


@pytest.mark.slow
@pytest.mark.parametrize(
    "messages", [[{"role": "user", "content": "x" * 200_000}], [*HELLO] * 3_000], ids=["long", "many"]
)
async def test_what_no_context_holds_is_refused_before_it_is_counted(
    gateway: RunningGateway,
    client: anthropic.AsyncAnthropic,
    monkeypatch: pytest.MonkeyPatch,
    messages: list[MessageParam],
) -> None:
    monkeypatch.setattr(PromptRenderer, "prompt_ids", None)
    with pytest.raises(anthropic.BadRequestError, match=f"context is {gateway.engine.context_length_tokens} tokens"):
        await client.messages.count_tokens(model="policy", messages=messages)


async def test_a_session_is_named_by_header_or_metadata_and_ended(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic
) -> None:
    named: Any = {"session_id": "s2", "user_id": "someone"}
    await ask(client, HELLO, stream=False, metadata=named)
    await ask(client, HELLO, stream=False, metadata=named, extra_headers={"X-Session-Id": "s3", "X-Session-Done": "1"})
    two, three = await gateway.recorded(ExchangeCompleted, at_least=2)
    (done,) = await gateway.recorded(SessionDone)
    assert (two.session_id, three.session_id, done.session_id) == ("s2", "s3", "s3")
    ended = await client.post("/v1/messages", cast_to=Message, body={"session_id": "s2", "session_done": True})
    assert (ended.content, len(await gateway.recorded(SessionDone, at_least=2))) == ([], 2)


@pytest.mark.parametrize("stream", [True, False])
async def test_each_refusal_is_the_sdk_s_exception(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="there are no tools to call") as bad:
        await ask(client, HELLO, stream=stream, tool_choice={"type": "any"})
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await client.messages.create(model="claude", max_tokens=1, messages=HELLO)
    gateway.engine.faults.append(Fault(status=503, message="busy"))
    with pytest.raises(anthropic.ServiceUnavailableError, match="busy") as away:
        await ask(client, HELLO, stream=stream)
    assert away.value.type == "overloaded_error"
    assert away.value.response.headers["retry-after"] == "2"
    long: list[MessageParam] = [{"role": "user", "content": "x" * 3000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2048 maximum"):
        await ask(client, long, stream=stream)


async def test_an_error_in_mid_stream_is_raised_by_the_sdk(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic
) -> None:
    gateway.engine.faults.append(Fault(cut_after_tokens=3))
    with pytest.raises(anthropic.APIStatusError, match="engine failed") as cut:
        await ask(client, HELLO, stream=True)
    assert cut.value.type == "overloaded_error"
    assert (await gateway.recorded(ExchangeFailed))[0].reason is FailureReason.ENGINE_FAILED


async def test_keys_are_read_from_either_header(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, api_key="secret") as gateway:
        either: list[dict[str, Any]] = [{"api_key": "secret"}, {"auth_token": "secret"}]
        for named in either:
            async with anthropic.AsyncAnthropic(base_url=gateway.url, max_retries=0, **named) as client:
                await ask(client, HELLO, stream=False)
        body = json.dumps({"model": "policy", "max_tokens": 9, "messages": HELLO}).encode()
        async with gateway.client.post(f"{gateway.url}/v1/messages", data=body, headers={"x-api-key": "secret"}) as ok:
            assert ok.status == 200
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await ask(client, HELLO, stream=True)
    assert refused.value.type == "authentication_error"


class Hasty(anthropic.AsyncAnthropic):
    """Waits for nothing before it tries again."""

    def _calculate_retry_timeout(self, *_args: Any, **_more: Any) -> float:
        return 0.0


async def test_a_retry_of_the_sdk_is_the_same_turn_asked_twice(gateway: RunningGateway) -> None:
    gateway.engine.faults.append(Fault(status=503, message="busy"))
    async with Hasty(base_url=gateway.url, api_key="none", max_retries=1) as client:
        await ask(client, HELLO, stream=False)
    exchange = await gateway.exchange()
    assert exchange.retry_count == 1
    assert len(await gateway.recorded(ExchangeFailed)) == 1


async def test_a_client_that_closes_its_stream_cancels_the_generation(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic
) -> None:
    gateway.say("x" * 500)
    gateway.engine.token_delay_s = 0.01
    async with client.messages.stream(model="policy", max_tokens=600, messages=HELLO) as stream:
        async for _ in stream.text_stream:
            break
    (failed,) = await gateway.recorded(ExchangeFailed)
    assert failed.reason is FailureReason.CLIENT_GONE
    assert gateway.engine.cancelled == [failed.exchange_id]


BODY = json.dumps({"model": "policy", "max_tokens": 20, "messages": HELLO, "stream": True}).encode()


async def test_no_stop_reason_is_seen_before_the_log_has_acknowledged(tokenizer_folder: Path) -> None:
    log = GatedLog()
    log.gate.clear()
    async with (
        running_gateway(tokenizer_folder, log=log, bounds=Bounds(ack_timeout_s=30.0)) as gateway,
        gateway.client.post(f"{gateway.url}/v1/messages", data=BODY) as answer,
        asyncio.timeout(WITHIN_S),
    ):
        await log.asked.wait()
        seen = await answer.content.readuntil(b'"text":"."}}\n\n')
        assert b"message_delta" not in seen
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await answer.content.readany()
        log.gate.set()
        rest = await answer.content.read()
    assert b'"stop_reason":"end_turn"' in rest
    assert rest.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')


@pytest.mark.slow
async def test_what_is_kept_nowhere_ends_its_stream_with_an_error(tokenizer_folder: Path) -> None:
    log = GatedLog()
    log.gate.clear()
    async with (
        running_gateway(tokenizer_folder, log=log, fsync=full_disk, bounds=Bounds(ack_timeout_s=0.05)) as gateway,
        gateway.client.post(f"{gateway.url}/v1/messages", data=BODY) as answer,
    ):
        raw = await answer.content.read()
        log.gate.set()
    assert b"event: error" in raw
    assert b"message_stop" not in raw


async def test_a_silent_stream_is_kept_alive_with_pings(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, bounds=Bounds(heartbeat_s=0.02)) as gateway:
        gateway.engine.hold()
        async with gateway.client.post(f"{gateway.url}/v1/messages", data=BODY) as answer, asyncio.timeout(WITHIN_S):
            start = await answer.content.readuntil(b"\n\n")
            for _ in range(3):
                assert await answer.content.readuntil(b"\n\n") == b'event: ping\ndata: {"type":"ping"}\n\n'
            gateway.engine.release()
            rest = await answer.content.read()
    assert start.startswith(b"event: message_start")
    assert b"message_start" not in rest
