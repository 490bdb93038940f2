"""Log-probs that clients ask for: the engine's own numbers in OpenAI's shape, streamed or not."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from clawstream.events import ExchangeCompleted
from tests.parts.engine.conftest import COMPUTING, Subject
from tests.parts.gateway.running_gateway import QUESTION, RunningGateway, running_gateway, until

pytestmark = pytest.mark.parametrize("subject", COMPUTING, indirect=True)


@pytest.fixture
async def gateway(subject: Subject) -> AsyncIterator[RunningGateway]:
    async with running_gateway(subject.model, engine_urls=(subject.url,), dialect=subject.dialect) as found:
        await until(found.ready)
        yield found


async def asked(gateway: RunningGateway, *, stream: bool, **more: Any) -> list[Any]:
    """What the OpenAI package reads of the log-probs, token by token."""
    client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    body: dict[str, Any] = {"model": "policy", "messages": QUESTION, "max_tokens": 12, "temperature": 1, **more}
    async with client:
        if not stream:
            whole = await client.chat.completions.create(**body)
            found = [choice.logprobs for choice in whole.choices]
        else:
            chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **body)]
            found = [choice.logprobs for chunk in chunks for choice in chunk.choices]
    return [token for logprobs in found if logprobs is not None for token in logprobs.content or ()]


@pytest.mark.parametrize("stream", [True, False])
async def test_each_token_has_the_log_prob_that_is_recorded_and_the_likeliest_beside_it(
    gateway: RunningGateway, stream: bool
) -> None:
    found = await asked(gateway, stream=stream, logprobs=True, top_logprobs=3)
    [exchange] = await gateway.recorded(ExchangeCompleted)
    ends = set(gateway.renderer.stop_token_ids)
    pairs = zip(exchange.output_ids, exchange.output_logprobs, strict=True)
    shown = [(gateway.renderer.decode((token,)), value) for token, value in pairs if token not in ends]
    assert [token.token for token in found] == [text for text, _ in shown]
    assert [token.logprob for token in found] == pytest.approx([value for _, value in shown], abs=1e-5)
    for token in found:
        likeliest = [other.logprob for other in token.top_logprobs]
        assert len(likeliest) == 3
        assert likeliest == sorted(likeliest, reverse=True)
        assert token.logprob <= likeliest[0] + 1e-5
    assert exchange.sampling.of_the_policy


@pytest.mark.parametrize("stream", [True, False])
async def test_without_top_logprobs_there_are_none_beside_and_unasked_there_are_none_at_all(
    gateway: RunningGateway, stream: bool
) -> None:
    found = await asked(gateway, stream=stream, logprobs=True)
    assert found
    assert not any(token.top_logprobs for token in found)
    assert await asked(gateway, stream=stream) == []
