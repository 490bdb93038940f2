"""Clients at a gateway whose engine is the CPU engine with the policy that the package ships: what they see is true."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from clawstream.events import ExchangeCompleted
from clawstream.local.servers.server_process import reserved
from clawstream.simulation.policy import recipe as base
from tests.parts.engine.process import cpu_engine
from tests.parts.gateway.running_gateway import RunningGateway, running_gateway, until
from tests.system.clients import javascript
from tests.system.clients.python import PACKAGES, seen_by

pytestmark = pytest.mark.timeout(300)
HERE = Path(__file__).parent
ERRORS = {
    "openai": "BadRequestError",
    "anthropic": "BadRequestError",
    "litellm": "ContextWindowExceededError",
    "langchain": "OpenAIContextOverflowError",
    "pydantic_ai": "ModelHTTPError",
    "instructor": "InstructorRetryException",
    "smolagents": "BadRequestError",
    "agents": "BadRequestError",
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shipped") / "policy"
    base.unpack(folder)
    return folder


@pytest.fixture(scope="module")
def engine_url(policy: Path) -> Iterator[str]:
    with reserved() as port, cpu_engine(policy, port) as url:
        yield url


@pytest.fixture
async def computing(policy: Path, engine_url: str) -> AsyncIterator[RunningGateway]:
    """A gateway in front of the engine."""
    async with running_gateway(policy, engine_urls=(engine_url,)) as gateway:
        await until(gateway.ready)
        yield gateway


async def check(gateway: RunningGateway, seen: dict[str, Any]) -> None:
    """What a client saw of its answers, in the order in which it asked, is what was sampled and recorded."""
    kinds = [kind for kind in ("chat", "stream", "forced", "forced stream") if kind in seen]
    recorded = await gateway.recorded(ExchangeCompleted, at_least=len(kinds))
    exchanges = sorted(recorded, key=lambda exchange: exchange.received_at_ms)
    for kind, exchange in zip(kinds, exchanges, strict=True):
        answer = json.loads(exchange.message)
        assert seen[kind] == (called(answer) if "forced" in kind else answer["content"])
        assert seen[kind]
        assert exchange.output_logprobs is not None
        assert len(exchange.output_logprobs) == len(exchange.output_ids)
    assert seen["usage"] == [len(exchanges[0].request.token_ids), len(exchanges[0].output_ids)]
    assert seen["forced"][1]["style"] in ("plain", "formal")


def called(answer: dict[str, Any]) -> list[Any]:
    """The first call of an answer."""
    call, *_ = answer["tool_calls"]
    return [call["function"]["name"], json.loads(call["function"]["arguments"])]


@pytest.mark.sdks
@pytest.mark.parametrize("client", PACKAGES)
async def test_a_python_sdk_sees_what_the_engine_sampled(computing: RunningGateway, client: str) -> None:
    seen = await seen_by(client, HERE / "sdks_on_engine.py", computing.url)
    await check(computing, seen)
    assert seen["error"] == ERRORS[client]


@pytest.mark.node
@pytest.mark.parametrize("client", ["openai", "responses", "chat", "anthropic"])
async def test_a_javascript_sdk_sees_what_the_engine_sampled(computing: RunningGateway, client: str) -> None:
    modules = javascript.openai() if client == "openai" else javascript.ai_sdk()
    seen = await javascript.run(HERE / "on_engine.cjs", client, computing.url, modules=modules)
    await check(computing, seen)
    assert seen["error"] == {"name": "BadRequestError" if client == "openai" else "AI_APICallError", "status": 400}
