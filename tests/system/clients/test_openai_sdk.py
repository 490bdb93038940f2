"""The real `openai` package against the gateway, sync and async."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionFunctionToolParam, ChatCompletionMessageParam

from clawstream.events import ExchangeCompleted, ExchangeFailed, FailureReason
from tests.fakes.scripted_engine import Fault, ScriptedAnswer
from tests.parts.gateway.running_gateway import RunningGateway
from tests.system.clients.turns import paired

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 2+2?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {"name": "add", "parameters": PARAMETERS, "strict": True},
}


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def call_first_then_say(gateway: RunningGateway, call: str, text: str) -> None:
    """From now on the engine calls a tool, and says the text once the result is there."""
    result = gateway.renderer.encode("<tool_response>")
    end = gateway.renderer.stop_token_ids[0]

    def script(prompt: Sequence[int]) -> ScriptedAnswer:
        return ScriptedAnswer(token_ids=(*gateway.renderer.encode(text if result[0] in prompt else call), end))

    gateway.engine.script = script


async def ask(
    client: openai.AsyncOpenAI, messages: list[ChatCompletionMessageParam], *, stream: bool, **more: Any
) -> ChatCompletion:
    """The completion, asked for either way."""
    if not stream:
        whole: ChatCompletion = await client.chat.completions.create(model="policy", messages=messages, **more)
        return whole
    async with client.chat.completions.stream(model="policy", messages=messages, **more) as found:
        return await found.get_final_completion()


@pytest.mark.parametrize("stream", [True, False])
async def test_tools_go_round_and_every_turn_is_paired(
    gateway: RunningGateway, client: openai.AsyncOpenAI, stream: bool
) -> None:
    call_first_then_say(gateway, f"<think>\nAdd.\n</think>\n\nLet me see. {CALL}\n{CALL}", "It is 4.")
    history: list[Any] = [*HELLO]
    first = (await ask(client, history, stream=stream, tools=[TOOL])).choices[0]
    assert (first.finish_reason, first.message.content) == ("tool_calls", "Let me see.")
    calls = first.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls if call.type == "function"] == [{"a": 2, "b": 2}] * 2
    history.append(first.message.to_dict())
    history += [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in calls]
    second = (await ask(client, history, stream=stream, tools=[TOOL])).choices[0]
    assert (second.finish_reason, second.message.content) == ("stop", "It is 4.")
    history += [second.message.to_dict(), {"role": "user", "content": "Thanks."}]
    await ask(client, history, stream=stream, tools=[TOOL])
    one, two, three = exchanges = await gateway.recorded(ExchangeCompleted, at_least=3)
    assert one.session_id == two.session_id == three.session_id
    assert [turn.turn_id for turn in paired(exchanges)] == [one.exchange_id, two.exchange_id]
    assert [len(turn.next_state) for turn in paired(exchanges)] == [2, 1]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_sync_client_is_answered_alike(gateway: RunningGateway, stream: bool) -> None:
    def asked() -> str | None:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            if not stream:
                whole = client.chat.completions.create(model="policy", messages=HELLO)
                return whole.choices[0].message.content
            with client.chat.completions.stream(model="policy", messages=HELLO) as found:
                return found.get_final_completion().choices[0].message.content

    assert await asyncio.to_thread(asked) == "It is 4."


async def test_usage_comes_last_where_it_is_asked_for(gateway: RunningGateway, client: openai.AsyncOpenAI) -> None:
    final = await ask(client, HELLO, stream=True, stream_options={"include_usage": True})
    assert final.usage is not None
    assert final.usage.prompt_tokens == len((await gateway.exchange()).request.token_ids)


@pytest.mark.parametrize("stream", [True, False])
async def test_several_choices_come_whole_and_the_chat_goes_on_with_any_of_them(
    gateway: RunningGateway, client: openai.AsyncOpenAI, stream: bool
) -> None:
    numbers = count()
    end = gateway.renderer.stop_token_ids[0]
    gateway.engine.script = lambda _: ScriptedAnswer(
        token_ids=(*gateway.renderer.encode(f"Answer {next(numbers)}."), end)
    )
    final = await ask(client, HELLO, stream=stream, n=3)
    exchanges = await gateway.recorded(ExchangeCompleted, at_least=3)
    named = {f"chatcmpl-{one.exchange_id}": json.loads(one.message)["content"] for one in exchanges}
    assert [choice.index for choice in final.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in final.choices} == {"stop"}
    said = [choice.message.content for choice in final.choices]
    assert len(set(said)) == 3
    if not stream:  # the helper of streams drops what it does not know
        assert [named[str(choice.to_dict()["response_id"])] for choice in final.choices] == said
        assert final.usage is not None
        assert final.usage.completion_tokens == sum(len(one.output_ids) for one in exchanges)
    assert set(named.values()) == set(said)
    chosen: list[Any] = [*HELLO, {"role": "assistant", "content": said[2]}, {"role": "user", "content": "Good."}]
    await ask(client, chosen, stream=stream)
    exchanges = await gateway.recorded(ExchangeCompleted, at_least=4)
    [turn] = paired(exchanges)
    assert named[f"chatcmpl-{turn.turn_id}"] == said[2]
    with pytest.raises(openai.BadRequestError, match="n is 9; expected an integer from 1 to 8"):
        await ask(client, HELLO, stream=stream, n=9)


@pytest.mark.parametrize("stream", [True, False])
async def test_each_refusal_is_the_sdk_s_exception(
    gateway: RunningGateway, client: openai.AsyncOpenAI, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await ask(client, HELLO, stream=stream, tool_choice={"type": "allowed_tools"})
    assert (bad.value.code, bad.value.param) == ("unsupported_value", "tool_choice")
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt", messages=HELLO)
    assert missing.value.code == "model_not_found"
    gateway.engine.faults.append(Fault(status=503, message="busy"))
    with pytest.raises(openai.InternalServerError, match="busy") as away:
        await ask(client, HELLO, stream=stream)
    assert away.value.status_code == 503


async def test_an_error_in_mid_stream_is_raised_by_the_sdk(gateway: RunningGateway, client: openai.AsyncOpenAI) -> None:
    gateway.engine.faults.append(Fault(cut_after_tokens=3))
    with pytest.raises(openai.APIError, match="engine failed"):
        await ask(client, HELLO, stream=True)
    assert (await gateway.recorded(ExchangeFailed))[0].reason is FailureReason.ENGINE_FAILED


class Hasty(openai.AsyncOpenAI):
    """Waits for nothing before it tries again."""

    def _calculate_retry_timeout(self, *_args: Any, **_more: Any) -> float:
        return 0.0


async def test_a_retry_of_the_sdk_says_which_it_is(gateway: RunningGateway) -> None:
    gateway.engine.faults.append(Fault(status=503, message="busy"))
    async with Hasty(base_url=f"{gateway.url}/v1", api_key="none", max_retries=1) as client:
        await ask(client, HELLO, stream=True)
    exchange = await gateway.exchange()
    (failed,) = await gateway.recorded(ExchangeFailed)
    assert exchange.retry_count == 1
    assert failed.reason is FailureReason.ENGINE_FAILED


async def test_a_client_that_closes_its_stream_cancels_the_generation(
    gateway: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    gateway.say("x" * 500)
    gateway.engine.token_delay_s = 0.01
    async with client.chat.completions.stream(model="policy", messages=HELLO) as stream:
        async for _ in stream:
            break
    (failed,) = await gateway.recorded(ExchangeFailed)
    assert failed.reason is FailureReason.CLIENT_GONE
    assert gateway.engine.cancelled == [failed.exchange_id]


async def test_metadata_is_recorded_and_may_name_the_session(
    gateway: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    metadata = {"session_id": "s4", "ticket": "4711"}
    await ask(client, HELLO, stream=False, metadata=metadata, store=True)
    exchange = await gateway.exchange()
    options = json.loads(exchange.request.options or b"")
    assert (exchange.session_id, options["metadata"], options["store"]) == ("s4", {"ticket": "4711"}, True)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({str(number): "x" for number in range(17)}, "metadata has 17 pairs; expected at most 16"),
        ({"k" * 65: "x"}, "metadata has a key of 65 characters; expected at most 64"),
        ({"k": "x" * 513}, "metadata.k has 513 characters; expected at most 512"),
        ({"k": 1}, "metadata.k is a number; expected a string"),
    ],
    ids=["17 pairs", "a long key", "a long value", "a number"],
)
async def test_metadata_has_openai_s_limits(client: openai.AsyncOpenAI, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        await ask(client, HELLO, stream=False, metadata=metadata)


async def test_metadata_at_its_limits_is_taken(client: openai.AsyncOpenAI) -> None:
    await ask(client, HELLO, stream=False, metadata={"k" * 62 + f"{at:02}": "x" * 512 for at in range(16)})
