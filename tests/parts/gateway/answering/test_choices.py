"""Several answers to one request (`n`): each is an exchange that was sampled by itself, and all are one group."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from clawstream.events import (
    ExchangeCompleted,
    ExchangeFailed,
    FailureReason,
    OrphanReason,
    SessionDone,
    TurnOrphaned,
    TurnPaired,
)
from clawstream.gateway.access.key_file import add_key
from clawstream.gateway.access.keys import Allowance
from tests.fakes.scripted_engine import Fault, ScriptedAnswer
from tests.parts.gateway.requests.test_feedback import given
from tests.parts.gateway.running_gateway import QUESTION, Response, RunningGateway, everything, running_gateway, until
from tests.sessions import assistant, history, user
from tests.unit.turns.test_pairing import fates

SESSION = {"X-Session-Id": "ann"}


@pytest.fixture
async def gateway(tokenizer_folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer_folder) as found:
        say_in_turn(found)
        yield found


def say_in_turn(gateway: RunningGateway) -> None:
    """Each answer of the engine's is another."""
    numbers = count()

    def script(_prompt: Sequence[int]) -> ScriptedAnswer:
        text = f"Answer {next(numbers)}."
        return ScriptedAnswer(token_ids=(*gateway.renderer.encode(text), gateway.renderer.stop_token_ids[0]))

    gateway.engine.script = script


def texts(response: Response) -> list[str]:
    """What each choice says."""
    if response.body:
        return [choice["message"]["content"] for choice in response.body["choices"]]
    found: dict[int, str] = {}
    for event in response.events:
        for choice in event["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return [found[index] for index in sorted(found)]


def response_ids(response: Response) -> list[str]:
    """The ids by which feedback names the choices."""
    choices = response.body.get("choices") or [one for event in response.events for one in event["choices"]]
    named = {one["index"]: one["response_id"] for one in choices if "response_id" in one}
    return [named[index].removeprefix("chatcmpl-") for index in sorted(named)]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_is_an_exchange_with_its_own_tokens_and_all_are_one_group(
    gateway: RunningGateway, stream: bool
) -> None:
    asked = await gateway.chat(n=3, stream=stream, stream_options={"include_usage": True}, headers=SESSION)
    assert asked.status == 200
    exchanges = {one.exchange_id: one for one in await gateway.recorded(ExchangeCompleted, at_least=3)}
    ids = response_ids(asked)
    assert len(set(ids)) == len(exchanges) == 3
    first = ids[0]
    usage = asked.events[-1]["usage"] if stream else asked.body["usage"]
    assert (asked.events[0] if stream else asked.body)["id"] == f"chatcmpl-{first}"
    for exchange_id, text in zip(ids, texts(asked), strict=True):
        exchange = exchanges[exchange_id]
        assert gateway.renderer.decode(exchange.output_ids[:-1]) == text == json.loads(exchange.message)["content"]
        assert len(exchange.output_logprobs) == len(exchange.output_ids)
        assert (exchange.choice_of, exchange.group_id, exchange.group_size) == (first, first, 3)
        assert exchange.session_id == "ann"
    assert len(set(texts(asked))) == 3
    whole = history(exchanges.values())
    assert {one.messages for one in whole.values()} == {whole[first].messages}
    assert usage["completion_tokens"] == sum(len(one.output_ids) for one in exchanges.values())
    assert usage["prompt_tokens"] == len(whole[first].token_ids)
    if stream:
        assert asked.done
        assert sorted(asked.finish_reasons) == ["stop"] * 3
        roles = [choice["index"] for event in asked.events for choice in event["choices"] if "role" in choice["delta"]]
        assert sorted(roles) == [0, 1, 2]


async def test_the_chunks_of_several_choices_are_interleaved(gateway: RunningGateway) -> None:
    gateway.engine.token_delay_s = 0.01
    asked = await gateway.chat(n=2, stream=True)
    order = [choice["index"] for event in asked.events for choice in event["choices"]]
    assert order != sorted(order)


async def test_a_client_goes_on_with_any_choice_and_its_tokens_stand_in_the_next_prompt(
    gateway: RunningGateway,
) -> None:
    first = await gateway.chat(n=3)
    chosen, chosen_id = texts(first)[1], response_ids(first)[1]
    said = user("Say it in words.")
    second = await gateway.chat([*QUESTION, assistant(chosen), said])
    assert second.headers["x-session-id"] == first.headers["x-session-id"]
    exchanges = await gateway.recorded(ExchangeCompleted, at_least=4)
    whole = history(exchanges)
    last = next(one for one in exchanges if one.choice_of is None)
    sampled = next(one for one in exchanges if one.exchange_id == chosen_id)
    so_far = whole[chosen_id].token_ids + sampled.output_ids
    assert last.num_spliced == 1
    assert whole[last.exchange_id].token_ids[: len(so_far)] == so_far
    found = fates(exchanges)
    assert [event.turn_id for event in found if isinstance(event, TurnPaired)] == [chosen_id]
    passed_over = {event.turn_id: event.reason for event in found if isinstance(event, TurnOrphaned)}
    assert passed_over == dict.fromkeys(set(response_ids(first)) - {chosen_id}, OrphanReason.REGENERATED)


async def test_feedback_on_a_choice_is_on_its_own_exchange(gateway: RunningGateway) -> None:
    asked = await gateway.chat(n=2, headers=SESSION)
    for choice, score in zip(asked.body["choices"], (1.0, -1.0), strict=True):
        body = {"response_id": choice["response_id"], "source": "environment", "score": score}
        async with gateway.client.post(f"{gateway.url}/v1/feedback", json=body) as answer:
            assert answer.status == 201, await answer.text()
    rated = await given(gateway)
    assert [(one.turn_id, one.score) for one in rated] == list(zip(response_ids(asked), (1.0, -1.0), strict=True))
    assert {one.session_id for one in rated} == {"ann"}


async def test_the_session_s_end_stands_behind_all_its_choices(gateway: RunningGateway) -> None:
    await gateway.chat(n=4, headers=SESSION | {"X-Session-Done": "1"})
    *answers, last = await everything(gateway.log)
    assert [type(one) for one in answers] == [ExchangeCompleted] * 4
    assert isinstance(last, SessionDone)


async def test_choices_have_seeds_of_their_own(gateway: RunningGateway) -> None:
    await gateway.chat(n=3, seed=2**63 - 1)
    exchanges = await gateway.recorded(ExchangeCompleted, at_least=3)
    seeds = {one.exchange_id: one.sampling.seed for one in exchanges}
    assert set(seeds.values()) == {2**63 - 1, -(2**63), -(2**63) + 1}


async def test_log_probs_are_each_choice_s_own(gateway: RunningGateway) -> None:
    asked = await gateway.chat(n=2, logprobs=True)
    exchanges = {one.exchange_id: one for one in await gateway.recorded(ExchangeCompleted, at_least=2)}
    for exchange_id, choice in zip(response_ids(asked), asked.body["choices"], strict=True):
        shown = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert shown == pytest.approx(exchanges[exchange_id].output_logprobs[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_where_one_choice_fails_the_request_fails_and_what_was_recorded_stays(
    gateway: RunningGateway, stream: bool
) -> None:
    gateway.engine.hold()  # the failing one is asked last: the others wait for their first token
    gateway.engine.faults.extend([Fault(), Fault(), Fault(status=400, message="no such thing")])
    asked = await gateway.chat(n=3, stream=stream, headers=SESSION)
    assert asked.status == 400
    assert "no such thing" in asked.body["error"]["message"]
    failed = await gateway.recorded(ExchangeFailed, at_least=3)
    assert {one.reason for one in failed} == {FailureReason.ENGINE_REFUSED}
    assert sum("another answer to the request failed" in one.detail for one in failed) == 2
    gateway.engine.release()
    gateway.engine.faults.clear()
    assert (await gateway.chat(n=2, headers=SESSION)).status == 200
    assert len(await gateway.recorded(ExchangeCompleted, at_least=2)) == 2


async def test_a_stream_breaks_off_where_one_choice_breaks_off_and_ends_with_no_done(gateway: RunningGateway) -> None:
    gateway.engine.token_delay_s = 0.01
    gateway.engine.faults.extend([Fault(), Fault(cut_after_tokens=2)])
    asked = await gateway.chat(n=2, stream=True)
    assert "error" in asked.events[-1]
    assert not asked.done
    [failed, *others] = await gateway.recorded(ExchangeFailed)
    assert {one.reason for one in (failed, *others)} == {FailureReason.ENGINE_FAILED}


async def test_a_client_that_goes_away_ends_all_choices_and_is_paired_with_none_of_their_parts(
    gateway: RunningGateway,
) -> None:
    gateway.engine.token_delay_s = 0.05
    body = {"model": "policy", "messages": QUESTION, "n": 3, "stream": True}
    async with gateway.asking(json.dumps(body).encode(), headers=SESSION) as answer:
        await answer.content.readany()
        answer.close()
    failed = await gateway.recorded(ExchangeFailed, at_least=3)
    assert {(one.reason, one.message) for one in failed} == {(FailureReason.CLIENT_GONE, None)}
    gateway.engine.token_delay_s = 0.0

    async def idle() -> bool:
        return not gateway.engine.running

    await until(idle)
    assert (await gateway.chat([*QUESTION, user("Shorter.")], headers=SESSION)).status == 200
    events = [one for one in await everything(gateway.log) if isinstance(one, ExchangeCompleted | ExchangeFailed)]
    assert fates(events) == []


async def test_choices_beside_a_named_group_are_refused(gateway: RunningGateway) -> None:
    asked = await gateway.chat(n=2, headers={"X-Group-Id": "task"})
    assert (asked.status, asked.body["error"]["param"]) == (400, "n")
    assert "n is 2 beside X-Group-Id 'task'" in asked.body["error"]["message"]
    assert (await gateway.chat(n=1, headers={"X-Group-Id": "task"})).status == 200


async def test_each_choice_takes_a_place_of_those_in_flight(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, max_in_flight=4) as gateway:
        refused = await gateway.chat(n=5)
        assert (refused.status, refused.body["error"]["param"]) == (400, "n")
        assert "n is 5" in refused.body["error"]["message"]
        gateway.engine.hold()
        async with asyncio.TaskGroup() as group:
            held = group.create_task(gateway.chat(n=3))

            async def generating() -> bool:
                return len(gateway.engine.running) == 3

            await until(generating)
            assert (await gateway.chat(n=2)).status == 503
            gateway.engine.release()
        assert held.result().status == 200
        assert (await gateway.chat(n=4)).status == 200


async def test_each_choice_takes_a_place_of_its_key_s_and_its_group_is_the_key_s(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "anna", Allowance(max_concurrent=3))
    headers = {"Authorization": f"Bearer {key}"}
    async with running_gateway(tokenizer_folder, keys_file=path) as gateway:
        refused = await gateway.chat(n=4, headers=headers)
        assert (refused.status, refused.body["error"]["param"]) == (400, "n")
        assert (await gateway.chat(n=3, headers=headers)).status == 200
        exchanges = await gateway.recorded(ExchangeCompleted, at_least=3)
        assert {one.group_id for one in exchanges} == {f"anna/{exchanges[0].choice_of}"}


async def test_a_gateway_that_starts_again_goes_on_with_a_choice(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder) as gateway:
        say_in_turn(gateway)
        first = await gateway.chat(n=3)
        async with running_gateway(tokenizer_folder, log=gateway.log) as again:
            second = await again.chat([*QUESTION, assistant(texts(first)[2]), user("Why?")])
            assert second.headers["x-session-id"] == first.headers["x-session-id"]
            last = [one for one in await again.recorded(ExchangeCompleted, at_least=4) if one.choice_of is None]
        assert [one.num_spliced for one in last] == [1]


@pytest.mark.parametrize(("path", "more"), [("/v1/messages", {"max_tokens": 5}), ("/v1/responses", {"input": "Hi"})])
async def test_routes_that_have_no_n_refuse_it_by_name(
    gateway: RunningGateway, path: str, more: dict[str, Any]
) -> None:
    body = {"model": "policy", "n": 2, **({"messages": QUESTION} if "messages" in path else {}), **more}
    answer: aiohttp.ClientResponse
    async with gateway.client.post(f"{gateway.url}{path}", json=body) as answer:
        assert answer.status == 400
        assert "n is not supported" in (await answer.json())["error"]["message"]
