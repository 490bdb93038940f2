"""Asking and being answered, streamed and whole, and what the log then holds."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionFunctionToolParam

from clawstream.config import SamplesSettings
from clawstream.events import ExchangeCompleted, FinishReason, SessionDone, TurnType, VersionSpan
from tests.fakes.scripted_engine import token_logprob
from tests.parts.gateway.running_gateway import QUESTION, RunningGateway, running_gateway

CALL = '<tool_call>\n{"name": "exec", "arguments": {"command": "ls"}}\n</tool_call>'
TOOL: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {"name": "exec", "parameters": {"type": "object"}},
}
TRACE = "00-81ac36bcc6438afa0615e630d5d56c65-b55e90cfd0d53095-01"


@pytest.fixture
async def gateway(tokenizer_folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer_folder) as found:
        yield found


async def test_a_plain_answer_is_a_completion_and_an_exchange_on_the_log(gateway: RunningGateway) -> None:
    response = await gateway.chat(headers={"X-Session-Id": "s1", "traceparent": TRACE}, seed=5, temperature=0.5)
    exchange = await gateway.exchange()
    prompt = gateway.renderer.prompt_ids(QUESTION, {})
    said = (*gateway.renderer.encode("It is 4."), gateway.renderer.stop_token_ids[0])
    assert response.status == 200
    assert response.body["id"] == f"chatcmpl-{exchange.exchange_id}"
    assert response.body["session_id"] == response.headers["x-session-id"] == exchange.session_id == "s1"
    assert response.body["choices"][0]["message"] == {"role": "assistant", "content": "It is 4."}
    assert response.body["choices"][0]["finish_reason"] == "stop"
    assert response.body["usage"]["prompt_tokens"] == len(prompt)
    assert response.body["usage"]["completion_tokens"] == len(said)
    assert exchange.request.token_ids == prompt
    assert exchange.output_ids == said
    assert exchange.output_logprobs == tuple(
        pytest.approx(token_logprob(len(prompt) + at, token)) for at, token in enumerate(said)
    )
    assert exchange.versions == (VersionSpan(policy_version=0, num_tokens=len(said)),)
    assert exchange.finish_reason is FinishReason.STOP
    assert (exchange.sampling.seed, exchange.sampling.temperature) == (5, 0.5)
    assert exchange.trace_id == TRACE.split("-")[1]
    assert json.loads(exchange.message) == {"role": "assistant", "content": "It is 4."}
    assert [json.loads(message) for message in exchange.request.messages] == QUESTION


async def test_a_stream_has_a_chunk_for_each_token_and_its_usage_at_the_end(gateway: RunningGateway) -> None:
    response = await gateway.chat(stream=True, stream_options={"include_usage": True})
    assert response.done
    assert response.text == "It is 4."
    assert response.finish_reasons == ["stop"]
    assert response.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "I"}
    assert response.events[-1]["choices"] == []
    assert response.events[-1]["usage"]["completion_tokens"] == len("It is 4.") + 1
    assert {event["session_id"] for event in response.events} == {response.headers["x-session-id"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_are_of_every_token_but_the_one_that_ends_the_answer(
    gateway: RunningGateway, stream: bool
) -> None:
    response = await gateway.chat(stream=stream, logprobs=True)
    exchange = await gateway.exchange()
    assert exchange.output_ids[-1] in gateway.renderer.stop_token_ids
    choices = [choice for body in response.events or [response.body] for choice in body["choices"]]
    found = [token for choice in choices if choice.get("logprobs") for token in choice["logprobs"]["content"]]
    assert [token["token"] for token in found] == list("It is 4.")
    assert [token["logprob"] for token in found] == pytest.approx(exchange.output_logprobs[:-1])


async def test_a_stream_begins_with_the_first_token_even_if_that_shows_nothing(gateway: RunningGateway) -> None:
    gateway.say("<think>\nhm\n</think>\n\nok")
    response = await gateway.chat(stream=True)
    assert response.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert response.events[1]["choices"][0]["delta"] == {"reasoning_content": "h"}


async def test_without_include_usage_no_usage_is_streamed(gateway: RunningGateway) -> None:
    response = await gateway.chat(stream=True)
    assert all("usage" not in event for event in response.events)


async def test_the_openai_client_understands_stream_and_tool_calls(gateway: RunningGateway) -> None:
    gateway.say(f"<think>\nhm\n</think>\n\nLook. {CALL}")
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "list"}], tools=[TOOL], stream=True
        )
        choices = [chunk.choices[0] async for chunk in stream]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert "".join(choice.delta.content or "" for choice in choices) == "Look."
    assert "".join(getattr(choice.delta, "reasoning_content", "") for choice in choices) == "hm"
    assert [(call.index, call.function and call.function.to_dict()) for call in calls] == [
        (0, {"name": "exec", "arguments": '{"command": "ls"}'})
    ]
    assert choices[-1].finish_reason == "tool_calls"
    message = json.loads((await gateway.exchange()).message)
    assert (message["content"], message["reasoning_content"]) == ("Look.", "hm")


async def test_a_stop_string_ends_the_answer_and_is_not_shown(gateway: RunningGateway) -> None:
    gateway.say("one two three four")
    response = await gateway.chat(stream=True, stop=["three", "four"])
    exchange = await gateway.exchange()
    assert (response.text, response.finish_reasons) == ("one two ", ["stop"])
    assert gateway.renderer.decode(exchange.output_ids) == "one two three"


async def test_max_tokens_end_an_answer_by_length(gateway: RunningGateway) -> None:
    response = await gateway.chat(max_completion_tokens=3, max_tokens=7)
    assert response.body["choices"][0]["message"]["content"] == "It"
    assert response.body["choices"][0]["finish_reason"] == "length"
    assert len((await gateway.exchange()).output_ids) == 3


async def test_more_tokens_than_fit_are_cut_to_the_context(gateway: RunningGateway) -> None:
    await gateway.chat(max_completion_tokens=8192)
    exchange = await gateway.exchange()
    assert exchange.sampling.max_tokens == gateway.engine.context_length_tokens - len(exchange.request.token_ids)


@pytest.mark.slow
async def test_each_request_shares_cache_only_within_its_policy_version(gateway: RunningGateway) -> None:
    await gateway.chat()
    assert gateway.engine.calls[-1].request.extra_key == "policy:0"


async def test_surrogates_and_nul_survive_to_the_log(gateway: RunningGateway) -> None:
    raw = b'{"model": "policy", "messages": [{"role": "user", "content": "a\\ud800b\\u0000c"}]}'
    assert (await gateway.post(raw)).status == 200
    exchange = await gateway.exchange()
    assert json.loads(exchange.request.messages[0])["content"] == "a\ud800b\x00c"
    assert "a\ufffdb\ufffdc" in gateway.renderer.decode(exchange.request.token_ids)


async def test_the_next_exchange_holds_what_is_new(gateway: RunningGateway) -> None:
    first = {"X-Session-Id": "s"}
    await gateway.chat(headers=first)
    longer = [*QUESTION, {"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "Sure?"}]
    await gateway.chat(longer, headers=first)
    one, two = await gateway.recorded(ExchangeCompleted, at_least=2)
    assert two.request.parent_exchange_id == one.exchange_id
    assert two.request.kept_messages == 1
    assert [json.loads(message)["role"] for message in two.request.messages] == ["assistant", "user"]
    assert two.request.options is None


async def test_a_side_turn_is_served_and_recorded_as_such(gateway: RunningGateway) -> None:
    response = await gateway.chat(headers={"X-Turn-Type": "side"})
    assert response.status == 200
    assert (await gateway.exchange()).turn_type is TurnType.SIDE


async def test_the_end_of_a_session_follows_its_last_exchange(gateway: RunningGateway) -> None:
    await gateway.chat(headers={"X-Session-Id": "s", "X-Session-Done": "1"})
    (done,) = await gateway.recorded(SessionDone)
    assert (done.session_id, done.after_exchange_id) == ("s", (await gateway.exchange()).exchange_id)


async def test_a_session_can_be_ended_without_asking_anything(gateway: RunningGateway) -> None:
    await gateway.chat(headers={"X-Session-Id": "s"})
    response = await gateway.chat([], session_id="s", session_done=True)
    (done,) = await gateway.recorded(SessionDone)
    assert response.status == 200
    assert done.after_exchange_id == (await gateway.exchange()).exchange_id
    await gateway.chat(headers={"X-Session-Id": "s"})
    exchanges = await gateway.recorded(ExchangeCompleted, at_least=2)
    assert [exchange.request.parent_exchange_id for exchange in exchanges] == [None, None]


async def test_models_name_the_one_that_is_served(gateway: RunningGateway) -> None:
    status, text = await gateway.get("/v1/models")
    assert (status, json.loads(text)["data"][0]["id"]) == (200, "policy")
    assert (await gateway.get("/v1/models/policy"))[0] == 200
    assert (await gateway.get("/v1/models/gpt"))[0] == 404


async def test_metrics_count_what_was_answered_and_hold_no_words(gateway: RunningGateway) -> None:
    await gateway.chat([{"role": "user", "content": "a secret"}])
    _, text = await gateway.get("/metrics")
    assert 'clawstream_requests_total{outcome="completed"} 1.0' in text
    assert 'clawstream_sessions_named_total{by="new"} 1.0' in text
    assert "clawstream_ttft_seconds_count 1.0" in text
    assert "secret" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [{"temperature": 0}, {"temperature": 1e-8}, {"top_p": 0.5}, {"top_k": 5}, {"temperature": 1.5, "top_k": 5}]
)
async def test_a_gateway_that_is_told_to_samples_from_the_whole_distribution_whatever_is_asked(
    tokenizer_folder: Path, asked: dict[str, Any]
) -> None:
    async with running_gateway(
        tokenizer_folder, samples=SamplesSettings(off_distribution="gateway_override")
    ) as gateway:
        await gateway.chat(**asked, seed=5)
        [exchange] = await gateway.recorded(ExchangeCompleted)
    sampling = exchange.sampling
    hot = asked.get("temperature", 0) > 0.1
    expected = asked["temperature"] if hot else gateway.settings.gateway.default_temperature
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (expected, 1.0, None, 5)
    [call] = gateway.engine.calls
    assert (call.request.sampling.temperature, call.request.sampling.top_p, call.request.sampling.top_k) == (
        expected, 1.0, None,
    )  # fmt: skip


async def test_a_side_turn_is_sampled_as_it_is_asked_for_also_then(tokenizer_folder: Path) -> None:
    override = SamplesSettings(off_distribution="gateway_override")
    async with running_gateway(tokenizer_folder, samples=override) as gateway:
        await gateway.chat(temperature=0, headers={"X-Turn-Type": "side"})
        [exchange] = await gateway.recorded(ExchangeCompleted)
    assert exchange.sampling.temperature == 0
