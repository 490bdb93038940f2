"""The gateway over real engines: what the client saw, what the log holds and what the engine computes are one."""

from collections.abc import AsyncIterator

import pytest

from clawstream.events import ExchangeCompleted
from tests.parts.engine.conftest import COMPUTING, Subject
from tests.parts.gateway.running_gateway import QUESTION, RunningGateway, running_gateway, until
from tests.sessions import history, user

pytestmark = pytest.mark.parametrize("subject", COMPUTING[1:], indirect=True)


@pytest.fixture
async def gateway(subject: Subject) -> AsyncIterator[RunningGateway]:
    async with running_gateway(subject.model, engine_urls=(subject.url,), dialect=subject.dialect) as found:
        await until(found.ready)
        yield found


async def test_streamed_chat_is_recorded_with_the_tokens_logprobs_and_version_of_the_engine(
    gateway: RunningGateway, subject: Subject
) -> None:
    shown = await gateway.chat(stream=True, temperature=0.0, max_tokens=40)
    exchange = await gateway.exchange()
    prompt = exchange.request.token_ids
    scores = await subject.engine.score([*prompt, *exchange.output_ids], len(prompt), extra_key="nobody else's")
    assert (shown.status, shown.done) == (200, True)
    assert gateway.renderer.parse(exchange.output_ids, prompt, {}).content == shown.text
    assert exchange.output_logprobs == pytest.approx(scores, abs=2e-4)
    assert [(span.policy_version, span.num_tokens) for span in exchange.versions] == [(1, len(exchange.output_ids))]


async def test_chat_that_goes_on_after_a_swap_is_answered_by_the_new_weights_alone(
    gateway: RunningGateway, subject: Subject
) -> None:
    first = await gateway.chat(temperature=1.0, max_tokens=20)
    await subject.engine.pause()
    await subject.engine.update_weights(str(subject.other_model), "2")
    await subject.engine.resume()
    # Nobody told the gateway; what it sent under the old key would be answered from the older weights' cache.
    asked = [*QUESTION, first.body["choices"][0]["message"], user("Go on.")]
    second = await gateway.chat(asked, stream=True, temperature=1.0, max_tokens=20)
    assert second.status == 200, second
    exchanges = await gateway.recorded(ExchangeCompleted, at_least=2)
    exchange = exchanges[1]
    prompt = history(exchanges)[exchange.exchange_id].token_ids
    scores = await subject.engine.score([*prompt, *exchange.output_ids], len(prompt), extra_key="nobody else's")
    assert exchange.output_logprobs == pytest.approx(scores, abs=2e-4)
    assert [span.policy_version for span in exchange.versions] == [2]
