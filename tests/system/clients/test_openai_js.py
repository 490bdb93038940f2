"""The real `openai` package of npm against the gateway, run by node."""

from pathlib import Path
from typing import Any

import pytest

from clawstream.events import ExchangeCompleted, ExchangeFailed, FailureReason
from tests.fakes.scripted_engine import Fault
from tests.parts.gateway.running_gateway import RunningGateway
from tests.system.clients import javascript
from tests.system.clients.test_openai_sdk import CALL, call_first_then_say
from tests.system.clients.turns import paired

pytestmark = pytest.mark.node
CLIENT = Path(__file__).with_name("openai_client.cjs")


@pytest.fixture(scope="session")
def modules() -> Path:
    return javascript.openai()


async def seen(gateway: RunningGateway, modules: Path, scenario: str) -> dict[str, Any]:
    """What the client saw."""
    return await javascript.run(CLIENT, scenario, f"{gateway.url}/v1", modules=modules)


async def test_a_whole_answer(gateway: RunningGateway, modules: Path) -> None:
    answer = await seen(gateway, modules, "whole")
    exchange = await gateway.exchange()
    assert answer == {"id": f"chatcmpl-{exchange.exchange_id}", "text": "It is 4.", "finish": "stop"}


async def test_a_streamed_answer_with_its_usage(gateway: RunningGateway, modules: Path) -> None:
    answer = await seen(gateway, modules, "stream")
    exchange = await gateway.exchange()
    assert answer["text"] == "It is 4."
    assert answer["usage"]["completion_tokens"] == len(exchange.output_ids)


@pytest.mark.parametrize("scenario", ["tools", "streamedTools"])
async def test_the_tool_runner_calls_and_every_turn_is_paired(
    gateway: RunningGateway, modules: Path, scenario: str
) -> None:
    call_first_then_say(gateway, f"<think>\nAdd.\n</think>\n\n{CALL}\n{CALL}", "It is 4.")
    answer = await seen(gateway, modules, scenario)
    assert (answer["called"], answer["final"]) == ([{"a": 2, "b": 2}] * 2, "It is 4.")
    assert answer["text"] in ("", "It is 4.")
    exchanges = await gateway.recorded(ExchangeCompleted, at_least=2)
    assert len({exchange.session_id for exchange in exchanges}) == 1
    assert [len(turn.next_state) for turn in paired(exchanges)] == [2]


async def test_each_refusal_is_the_sdk_s_error(gateway: RunningGateway, modules: Path) -> None:
    gateway.engine.faults.append(Fault(status=503, message="busy"))
    found = (await seen(gateway, modules, "refusals"))["seen"]
    assert [(error["name"], error["status"], error["code"]) for error in found] == [
        ("BadRequestError", 400, None),
        ("NotFoundError", 404, "model_not_found"),
        ("InternalServerError", 503, "service_unavailable"),
    ]
    assert "tool_choice" in found[0]["message"]
    assert "busy" in found[2]["message"]


async def test_a_retry_says_which_it_is(gateway: RunningGateway, modules: Path) -> None:
    gateway.engine.faults.append(Fault(status=503, message="busy"))
    assert (await seen(gateway, modules, "retry"))["text"] == "It is 4."
    assert (await gateway.exchange()).retry_count == 1


async def test_an_abort_in_mid_stream_cancels_the_generation(gateway: RunningGateway, modules: Path) -> None:
    gateway.say("x" * 500)
    gateway.engine.token_delay_s = 0.01
    aborted = await seen(gateway, modules, "abort")
    (failed,) = await gateway.recorded(ExchangeFailed)
    assert (failed.reason, f"chatcmpl-{failed.exchange_id}") == (FailureReason.CLIENT_GONE, aborted["id"])
    assert gateway.engine.cancelled == [failed.exchange_id]
