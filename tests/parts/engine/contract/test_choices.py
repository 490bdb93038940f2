"""Several answers to one request from an engine that computes: each has the log-probs of its own tokens."""

from collections.abc import AsyncIterator

import pytest

from clawstream.events import ExchangeCompleted
from tests.parts.engine.conftest import COMPUTING, Subject
from tests.parts.gateway.running_gateway import RunningGateway, running_gateway, until
from tests.sessions import history

pytestmark = pytest.mark.parametrize("subject", COMPUTING, indirect=True)


@pytest.fixture
async def gateway(subject: Subject) -> AsyncIterator[RunningGateway]:
    async with running_gateway(subject.model, engine_urls=(subject.url,), dialect=subject.dialect) as found:
        await until(found.ready)
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_each_choice_s_tokens_have_the_log_probs_that_the_engine_computes_for_them(
    gateway: RunningGateway, subject: Subject, stream: bool
) -> None:
    asked = await gateway.chat(n=3, stream=stream, temperature=1.0, max_tokens=12)
    assert asked.status == 200
    exchanges = await gateway.recorded(ExchangeCompleted, at_least=3)
    whole = history(exchanges)
    assert len({exchange.output_ids for exchange in exchanges}) == 3
    for exchange in exchanges:
        prompt = whole[exchange.exchange_id].token_ids
        scores = await subject.engine.score([*prompt, *exchange.output_ids], len(prompt), extra_key="nobody else's")
        assert exchange.output_logprobs == pytest.approx(scores, abs=2e-4)
