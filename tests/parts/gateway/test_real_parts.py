"""The gateway on a real broker and a real engine: an exchange is asked, answered and read back from Kafka."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from clawstream.conversation.continuing import Request, answered, continue_prompt, find_echoes
from clawstream.events import ExchangeCompleted, ExchangeFailed, FailureReason, PolicyActivated
from clawstream.gateway.http.connection import Bounds
from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.server_process import reserved
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from tests.parts.engine.process import cpu_engine
from tests.parts.engine.tiny_model import make_model
from tests.parts.gateway.running_gateway import QUESTION, WITHIN_S, RunningGateway, running_gateway, until
from tests.renderers import load_renderer
from tests.sessions import history, user

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of one architecture with different weights."""
    folder = tmp_path_factory.mktemp("models")
    return make_model(folder / "first", seed=0), make_model(folder / "second", seed=1)


@pytest.fixture(scope="module")
def engine_url(models: tuple[Path, Path]) -> Iterator[str]:
    with reserved() as port, cpu_engine(models[0], port) as url:
        yield url


@pytest.fixture
async def log(kafka_bootstrap: str, topic_prefix: str) -> AsyncIterator[KafkaLog]:
    await admin.apply(kafka_bootstrap, topic_prefix, partitions=2)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as connected:
        yield connected


@pytest.fixture
async def gateway(models: tuple[Path, Path], engine_url: str, log: KafkaLog) -> AsyncIterator[RunningGateway]:
    async with running_gateway(
        models[0], log=log, engine_urls=(engine_url,), bounds=Bounds(ack_timeout_s=WITHIN_S)
    ) as found:
        await until(found.ready)
        yield found


async def test_a_streamed_conversation_can_be_read_back_from_kafka(
    gateway: RunningGateway, models: tuple[Path, Path], engine_url: str, log: KafkaLog
) -> None:
    first = await gateway.chat(stream=True, seed=1, temperature=1.0, max_tokens=40)
    answer = {"role": "assistant", "content": first.text}
    asked = [*QUESTION, answer, user("Go on.")]
    second = await gateway.chat(asked, seed=2, temperature=1.0, max_tokens=5)
    one, two = await gateway.recorded(ExchangeCompleted, at_least=2)
    renderer = load_renderer(models[0], "qwen3")
    assert first.done
    assert renderer.parse(one.output_ids, one.request.token_ids, {}).content == first.text
    assert len(one.output_ids) == len(one.output_logprobs)
    assert all(value is not None and value <= 0 for value in one.output_logprobs)
    assert second.headers["x-session-id"] == first.headers["x-session-id"] == one.session_id
    assert two.request.parent_exchange_id == one.exchange_id
    whole = history([one, two])[two.exchange_id]
    assert [json.loads(message) for message in whole.messages] == asked
    echoes = find_echoes(asked, [answered(QUESTION, {}, json.loads(one.message), one.output_ids)])
    from_log = continue_prompt(renderer, Request(messages=asked, raw=whole.messages, options={}), echoes)
    assert (whole.token_ids, two.num_spliced) == (from_log.token_ids, from_log.num_spliced)

    async with running_gateway(
        models[0], log=log, engine_urls=(engine_url,), bounds=Bounds(ack_timeout_s=WITHIN_S)
    ) as again:
        await until(again.ready)
        third = await again.chat([*asked, second.body["choices"][0]["message"], user("And?")], max_tokens=2)
    assert third.headers["x-session-id"] == one.session_id


async def test_equal_seeds_give_equal_answers(gateway: RunningGateway) -> None:
    texts = [
        (await gateway.chat(seed=7, temperature=1.0, max_tokens=12)).body["choices"][0]["message"]["content"]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]


async def test_a_real_weight_change_cuts_no_stream(
    gateway: RunningGateway, models: tuple[Path, Path], engine_url: str, log: KafkaLog
) -> None:
    engine = SglangEngine(gateway.client, engine_url)
    body = {"model": "policy", "messages": QUESTION, "stream": True, "max_tokens": 600, "seed": 3, "temperature": 1.0}
    body |= {"chat_template_kwargs": {"enable_thinking": False}}
    async with gateway.asking(json.dumps(body).encode()) as stream:
        await stream.content.readuntil(b"\n\n")
        await engine.pause()
        await engine.update_weights(str(models[1]), "1")
        await engine.resume()
        rest = await stream.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    (exchange,) = await gateway.recorded(ExchangeCompleted)
    assert [span.policy_version for span in exchange.versions] == [0, 1]
    activated = PolicyActivated(
        policy_id="policy", policy_version=1, engine=engine.url, adapter=None, pause_ms=1.0, num_bytes=1,
        activated_at_ms=1,
    )  # fmt: skip
    await log.append((activated,))

    async def heard() -> bool:
        return (await gateway.chat(max_tokens=1)).headers["x-policy-version"] == "1"

    await until(heard)


async def test_a_client_that_leaves_frees_the_real_engine(gateway: RunningGateway, engine_url: str) -> None:
    engine = SglangEngine(gateway.client, engine_url)

    async def num_running() -> int:
        async with gateway.client.get(f"{engine_url}/server_info") as answer:
            return int((await answer.json())["internal_states"][0]["num_requests"])

    async def running() -> bool:
        return await num_running() == 1

    async def free() -> bool:
        return await num_running() == 0

    await engine.pause()
    leaving = asyncio.create_task(gateway.chat(stream=True))
    await until(running)
    leaving.cancel()
    await until(free)
    await engine.resume()
    (failed,) = await gateway.recorded(ExchangeFailed)
    assert failed.reason is FailureReason.CLIENT_GONE
