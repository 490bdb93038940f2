"""The real `openai` package against /v1/responses: the same exchanges as by Chat Completions, paired and spliced."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from clawstream.events import ExchangeCompleted, ExchangeFailed, FailureReason, SessionDone
from clawstream.gateway.access.key_file import add_key
from clawstream.gateway.access.keys import Allowance
from clawstream.gateway.http.connection import Bounds
from tests.fakes.memory_log import MemoryLog
from tests.fakes.scripted_engine import Fault
from tests.parts.gateway.outbox.test_promises import GatedLog
from tests.parts.gateway.running_gateway import WITHIN_S, RunningGateway, running_gateway
from tests.system.clients.test_openai_sdk import CALL, PARAMETERS, call_first_then_say
from tests.system.clients.turns import paired

TOOL: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Edits."}
THINK = "<think>\nAdd.\n</think>\n\n"


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as found:
        yield found


async def ask(client: openai.AsyncOpenAI, said: Any, *, stream: bool, **more: Any) -> Response:
    """The response, asked for either way."""
    if not stream:
        whole: Response = await client.responses.create(model="policy", input=said, **more)
        return whole
    async with client.responses.stream(model="policy", input=said, **more) as found:
        return await found.get_final_response()


def items_of(response: Response) -> list[Any]:
    return [item.to_dict() for item in response.output]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_is_an_exchange_in_the_form_of_chat_completions(
    gateway: RunningGateway, client: openai.AsyncOpenAI, stream: bool
) -> None:
    response = await ask(client, "What is 2+2?", stream=stream, instructions="Be brief.")
    exchange = await gateway.exchange()
    assert (response.id, response.output_text) == (f"resp_{exchange.exchange_id}", "It is 4.")
    assert stream or response._request_id == f"req_{exchange.exchange_id}"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.input_tokens == len(exchange.request.token_ids)
    assert response.usage.output_tokens == len(exchange.output_ids)
    assert [json.loads(said) for said in exchange.request.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2+2?"},
    ]
    assert json.loads(exchange.message) == {"role": "assistant", "content": "It is 4."}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_the_text_has_the_log_probs_that_are_recorded_of_its_tokens_alone(
    gateway: RunningGateway, client: openai.AsyncOpenAI, stream: bool
) -> None:
    gateway.say(f"{THINK}Let me see é. {CALL}")
    asked: Any = {"include": ["message.output_text.logprobs"], "tools": [TOOL]}
    response = await ask(client, "2+2?", stream=stream, **asked)
    exchange = await gateway.exchange()
    ids, end = exchange.output_ids, gateway.renderer.encode("</think>")[0]
    start = ids.index(end) + 1
    said = ids[start : ids.index(gateway.renderer.encode("<tool_call>")[0])]
    recorded = exchange.output_logprobs[start : start + len(said)]
    [message] = [item for item in response.output if item.type == "message"]
    assert message.content[0].type == "output_text"
    found = message.content[0].logprobs or []
    assert [token.logprob for token in found] == pytest.approx(recorded)
    assert gateway.renderer.decode(said).strip() == response.output_text == "Let me see é."
    unasked = items_of(await ask(client, "2+2?", stream=stream))[1]
    assert unasked["content"][0]["logprobs"] == []


async def test_the_deltas_of_a_stream_hold_the_log_probs_of_the_whole(
    gateway: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    gateway.say(f"{THINK}It is 4.")
    asked: Any = {"include": ["message.output_text.logprobs"], "stream": True}
    events = [event async for event in await client.responses.create(model="policy", input="2+2?", **asked)]
    grown = [
        token.logprob for event in events if event.type == "response.output_text.delta" for token in event.logprobs
    ]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert grown == [token.logprob for token in done.logprobs]
    assert len(grown) > 3


async def test_top_logprobs_without_the_log_probs_beside_are_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"message\.output_text\.logprobs") as refused:
        await ask(client, "2+2?", stream=False, top_logprobs=3)
    assert refused.value.param == "top_logprobs"


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_the_tokens_of_thoughts_are_counted(
    gateway: RunningGateway, client: openai.AsyncOpenAI, stream: bool
) -> None:
    for text, thought in ((f"{THINK}It is 4.", "\nAdd.\n"), ("It is 4.", "")):
        gateway.say(text)
        expected = len(gateway.renderer.encode(thought))
        response = await ask(client, "2+2?", stream=stream)
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == expected
        chat = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "2+2?"}])
        assert chat.usage is not None
        assert chat.usage.completion_tokens_details is not None
        assert chat.usage.completion_tokens_details.reasoning_tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("by_id", [True, False])
async def test_tools_go_round_every_turn_is_paired_and_no_answer_is_tokenised_twice(
    gateway: RunningGateway, client: openai.AsyncOpenAI, stream: bool, by_id: bool
) -> None:
    call_first_then_say(gateway, f"{THINK}Let me see. {CALL}\n{CALL}", "It is 4.")
    history: list[Any] = [{"role": "user", "content": "What is 2+2?"}]
    first = await ask(client, history, stream=stream, tools=[TOOL])
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"a": 2, "b": 2}] * 2
    results: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "4"} for call in calls]
    history += [*items_of(first), *results]
    named: dict[str, Any] = {"previous_response_id": first.id} if by_id else {}
    second = await ask(client, results if by_id else history, stream=stream, tools=[TOOL], **named)
    assert second.output_text == "It is 4."
    history += [*items_of(second), {"role": "user", "content": "Thanks."}]
    named = {"previous_response_id": second.id} if by_id else {}
    await ask(client, history[-1:] if by_id else history, stream=stream, tools=[TOOL], **named)
    one, two, three = exchanges = await gateway.recorded(ExchangeCompleted, at_least=3)
    assert one.session_id == two.session_id == three.session_id
    assert [turn.turn_id for turn in paired(exchanges)] == [one.exchange_id, two.exchange_id]
    assert [len(turn.next_state) for turn in paired(exchanges)] == [2, 1]
    assert [exchange.num_spliced for exchange in exchanges] == [0, 1, 2]


async def test_a_conversation_has_the_same_prompts_as_by_chat_completions(
    gateway: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    call_first_then_say(gateway, f"{THINK}Let me see. {CALL}", "It is 4.")
    tool: Any = {"type": "function", "function": {key: TOOL[key] for key in ("name", "parameters", "strict")}}
    system, hello = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}
    chat: list[Any] = [system, hello]
    items: list[Any] = [hello]
    for _ in range(2):
        answer = await client.chat.completions.create(
            model="policy", messages=chat, tools=[tool], extra_headers={"X-Session-Id": "chat"}
        )
        message = answer.choices[0].message
        chat.append(message.to_dict())
        chat += [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in message.tool_calls or ()]
        response = await client.responses.create(
            model="policy", input=items, tools=[TOOL], instructions="Be brief.", store=False,
            extra_headers={"X-Session-Id": "responses"},
        )  # fmt: skip
        items += items_of(response)
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
            for call in response.output
            if call.type == "function_call"
        ]
    exchanges = await gateway.recorded(ExchangeCompleted, at_least=4)
    prompts: dict[str, list[tuple[int, ...]]] = {"chat": [], "responses": []}
    for exchange in exchanges:
        before = prompts[exchange.session_id][-1:] or [()]
        kept = before[0][: exchange.request.kept_tokens]
        prompts[exchange.session_id].append((*kept, *exchange.request.token_ids))
    assert prompts["chat"] == prompts["responses"]
    assert [exchange.num_spliced for exchange in exchanges] == [0, 0, 1, 1]


async def test_a_custom_tool_is_called_with_bare_text(gateway: RunningGateway, client: openai.AsyncOpenAI) -> None:
    gateway.say('<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>')
    response = await ask(client, "Edit.", stream=True, tools=[PATCH])
    (call,) = response.output
    assert call.type == "custom_tool_call"
    assert call.input == "*** Begin"
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    await ask(client, [{"role": "user", "content": "Edit."}, call.to_dict(), output], stream=True, tools=[PATCH])
    exchanges = await gateway.recorded(ExchangeCompleted, at_least=2)
    assert exchanges[1].num_spliced == 1


async def test_a_schema_reaches_the_engine_and_is_parsed(gateway: RunningGateway, client: openai.AsyncOpenAI) -> None:
    class Sum(BaseModel):
        total: int

    gateway.say('{"total": 4}')
    response = await client.responses.parse(model="policy", input="What is 2+2?", text_format=Sum)
    assert response.output_parsed == Sum(total=4)
    shaping = (await gateway.exchange()).sampling.shaping
    assert shaping is not None
    assert "total" in (shaping.json_schema or "")


async def test_an_answer_that_is_cut_short_is_incomplete(client: openai.AsyncOpenAI) -> None:
    response = await ask(client, "What is 2+2?", stream=False, max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [True, False])
async def test_each_refusal_is_the_sdk_s_exception(
    gateway: RunningGateway, client: openai.AsyncOpenAI, stream: bool
) -> None:
    with pytest.raises(openai.NotFoundError, match="Send the conversation in input") as bad:
        await ask(client, "Hi", stream=stream, previous_response_id="resp_123")
    assert (bad.value.code, bad.value.param) == ("previous_response_not_found", "previous_response_id")
    gateway.engine.faults.append(Fault(status=503, message="busy"))
    with pytest.raises(openai.InternalServerError, match="busy"):
        await ask(client, "Hi", stream=stream)


async def test_a_stream_that_breaks_off_is_response_failed_and_on_the_log(
    gateway: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    gateway.engine.faults.append(Fault(cut_after_tokens=3))
    async with await client.responses.create(model="policy", input="Hi", stream=True) as stream:
        events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert "engine failed" in events[-1].response.error.message
    assert (await gateway.recorded(ExchangeFailed))[0].reason is FailureReason.ENGINE_FAILED


async def test_the_end_of_a_response_waits_for_its_record(tokenizer_folder: Path) -> None:
    log = GatedLog()
    log.gate.clear()
    async with (
        running_gateway(tokenizer_folder, log=log, bounds=Bounds(ack_timeout_s=WITHIN_S)) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        await client.responses.create(model="policy", input="Hi", stream=True) as stream,
    ):
        seen = []
        async for event in stream:
            seen.append(event.type)
            if seen.count("response.output_text.delta") == 1 and not log.asked.is_set():
                await log.asked.wait()
                assert "response.output_item.done" not in seen
                log.gate.set()
        assert seen[-1] == "response.completed"


async def test_a_response_is_gone_on_from_after_a_restart(tokenizer_folder: Path) -> None:
    log = MemoryLog()
    async with (
        running_gateway(tokenizer_folder, log=log) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        first = await ask(client, "What is 2+2?", stream=False, instructions="Be brief.")
    async with running_gateway(tokenizer_folder, log=log) as gateway:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            await ask(client, "Why?", stream=False, previous_response_id=first.id)
            kept = await ask(client, "Hm?", stream=False, store=False)
            with pytest.raises(openai.NotFoundError, match="store: false"):
                await ask(client, "And?", stream=False, previous_response_id=kept.id)
        answered = await gateway.recorded(ExchangeCompleted, at_least=3)
    one, two = (exchange for exchange in answered if f"resp_{exchange.exchange_id}" != kept.id)
    assert one.session_id == two.session_id
    (turn,) = paired([one, two])
    assert turn.turn_id == one.exchange_id


async def test_another_key_s_response_is_not_found(tokenizer_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    secrets = [add_key(path, name, Allowance()) for name in ("anna", "ben")]
    async with running_gateway(tokenizer_folder, keys_file=path) as gateway:
        base = f"{gateway.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=secrets[0], max_retries=0) as client:
            first = await ask(client, "What is 2+2?", stream=False)
        async with openai.AsyncOpenAI(base_url=base, api_key=secrets[1], max_retries=0) as client:
            for headers in ({}, {"X-Session-Id": "mine"}):
                with pytest.raises(openai.NotFoundError, match="not found"):
                    await ask(client, "Why?", stream=False, previous_response_id=first.id, extra_headers=headers)


async def test_a_thumb_finds_its_response_and_a_session_ends_without_input(
    gateway: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    response = await ask(client, "What is 2+2?", stream=True, extra_headers={"X-Session-Id": "s1"})
    thumb = {"response_id": response.id, "thumb": "down"}
    async with gateway.client.post(f"{gateway.url}/v1/feedback", json=thumb) as answer:
        assert (answer.status, (await answer.json())["session_id"]) == (201, "s1")
    done = {"session_done": True, "session_id": "s1"}
    async with gateway.client.post(f"{gateway.url}/v1/responses", json=done) as answer:
        assert (await answer.json())["output"] == []
    (ended,) = await gateway.recorded(SessionDone)
    assert (ended.session_id, ended.after_exchange_id) == ("s1", response.id.removeprefix("resp_"))
