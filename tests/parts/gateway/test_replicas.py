"""Several engines behind one gateway: who is asked, who is asked next, and which version an answer bears."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from clawstream.events import ExchangeCompleted, ExchangeFailed, PolicyActivated
from clawstream.gateway.access.key_file import add_key
from clawstream.gateway.access.keys import Allowance
from clawstream.inference.dialect import Call, TokenDelta
from clawstream.inference.service import Generation
from tests.bench.replicas import one_fails
from tests.fakes.scripted_engine import Fault, ScriptedAnswer, ScriptedBackend, serving
from tests.parts.gateway.running_gateway import Response, RunningGateway, running_gateway, until


class Cached:
    """A generation that says that it began from the cache."""

    def __init__(self, generation: Generation, cached_tokens: int = 64) -> None:
        self._generation = generation
        self._cached_tokens = cached_tokens

    async def next(self) -> TokenDelta:
        delta = await self._generation.next()
        delta.cached_tokens = self._cached_tokens
        return delta

    def cancel(self) -> None:
        self._generation.cancel()


class CachingBackend(ScriptedBackend):
    """It says that something was cached under every key that it has seen before, and under those in `known`."""

    known: set[str | None]

    async def start(self, call: Call) -> Generation:
        seen = {earlier.request.extra_key for earlier in self.calls} | self.known
        generation = await super().start(call)
        return Cached(generation) if call.request.extra_key in seen else generation


@dataclass(kw_only=True)
class Replicas:
    """A gateway over scripted engines."""

    gateway: RunningGateway
    engines: Sequence[CachingBackend]
    urls: Sequence[str]

    @property
    def calls(self) -> list[int]:
        """How many requests each engine got."""
        return [len(engine.calls) for engine in self.engines]

    async def home(self, session: str) -> int:
        """Ask once, and return which engine answered."""
        before = self.calls
        assert (await self.ask(session)).status == 200
        return next(number for number, calls in enumerate(self.calls) if calls > before[number])

    async def ask(self, session: str, *, stream: bool = False) -> Response:
        return await self.gateway.chat(headers={"X-Session-Id": session}, stream=stream)

    async def gauge(self, name: str, number: int) -> float:
        """A number that the gateway shows of an engine."""
        _, text = await self.gateway.get("/metrics")
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return float(lines.get(f'clawstream_{name}{{engine="{self.urls[number]}"}}', -1))

    async def tell(self, number: int, version: int, adapter: str | None = None) -> None:
        """Say on the log that an engine took a version over, and return once the gateway has heard it."""
        event = PolicyActivated(
            policy_id="policy", policy_version=version, engine=self.urls[number], adapter=adapter, pause_ms=1.0,
            num_bytes=1, activated_at_ms=version,
        )  # fmt: skip
        await self.gateway.log.append((event,))

        async def heard() -> bool:
            return await self.gauge("policy_version", number) == version

        await until(heard)


@asynccontextmanager
async def replicas(folder: Path, num_engines: int = 2) -> AsyncIterator[Replicas]:
    """So many scripted engines behind a gateway, each answering "It is 4."."""
    async with AsyncExitStack() as stack:
        engines = [
            CachingBackend(script=lambda _: ScriptedAnswer(token_ids=()), version="0") for _ in range(num_engines)
        ]
        urls = [await stack.enter_async_context(serving(engine)) for engine in engines]
        gateway = await stack.enter_async_context(running_gateway(folder, engine_urls=urls))
        ids = (*gateway.renderer.encode("It is 4."), gateway.renderer.stop_token_ids[0])
        for engine in engines:
            engine.known = set()
            engine.eos_token_ids = frozenset(gateway.renderer.stop_token_ids)
            engine.script = lambda _: ScriptedAnswer(token_ids=ids)
        found = Replicas(gateway=gateway, engines=engines, urls=urls)

        async def all_offered() -> bool:
            return all([await found.gauge("engine_offered", number) == 1 for number in range(num_engines)])

        await until(all_offered)
        yield found


@pytest.fixture
async def two(tokenizer_folder: Path) -> AsyncIterator[Replicas]:
    async with replicas(tokenizer_folder) as found:
        yield found


@pytest.mark.slow
async def test_a_session_keeps_to_one_engine_and_sessions_share_them(two: Replicas) -> None:
    homes = {f"s{n}": await two.home(f"s{n}") for n in range(20)}
    assert set(homes.values()) == {0, 1}
    assert [await two.home(session) for session in homes] == list(homes.values())


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", [Fault(cut_after_tokens=0), Fault(status=503)], ids=["cut", "overloaded"])
async def test_an_engine_that_fails_before_its_first_token_is_replaced_unseen(
    two: Replicas, fault: Fault, stream: bool
) -> None:
    home = await two.home("s")
    two.engines[home].faults.append(fault)
    response = await two.ask("s", stream=stream)
    exchanges = await two.gateway.recorded(ExchangeCompleted, at_least=2)
    assert response.status == 200
    assert len(exchanges) == 2
    assert await two.gateway.recorded(ExchangeFailed, at_least=0) == []
    rid = two.engines[1 - home].calls[-1].rid
    assert rid.endswith(exchanges[1].exchange_id)
    assert not rid.startswith(exchanges[1].exchange_id), "SGLang would abort it with the first, by the rid's beginning"


async def test_where_every_engine_fails_the_client_is_told_and_it_is_recorded_once(two: Replicas) -> None:
    for engine in two.engines:
        engine.faults.append(Fault(cut_after_tokens=0))
    response = await two.ask("s")
    (failed,) = await two.gateway.recorded(ExchangeFailed)
    assert (response.status, response.headers["retry-after"]) == (503, "2")
    assert failed.output_ids == ()
    assert two.calls == [1, 1]


async def test_after_its_first_token_no_request_is_asked_again(two: Replicas) -> None:
    home = await two.home("s")
    two.engines[home].faults.append(Fault(cut_after_tokens=3))
    response = await two.ask("s", stream=True)
    (failed,) = await two.gateway.recorded(ExchangeFailed)
    assert "engine failed" in response.events[-1]["error"]["message"]
    assert len(failed.output_ids) == 3
    assert two.calls[1 - home] == 0


async def test_a_request_that_one_engine_refuses_is_not_put_to_the_next(two: Replicas) -> None:
    home = await two.home("s")
    two.engines[home].faults.append(Fault(status=400, message="no such thing"))
    assert (await two.ask("s")).status == 400
    assert two.calls[1 - home] == 0


async def test_one_engine_is_enough_to_be_ready(tokenizer_folder: Path) -> None:
    async with replicas(tokenizer_folder) as found:
        gateway = found.gateway
        async with running_gateway(tokenizer_folder, engine_urls=(found.urls[0], "http://127.0.0.1:9")) as half:
            await until(half.ready)
            _, body = await half.get("/readyz")
            assert "http://127.0.0.1:9" in body
            assert (await half.chat()).status == 200
        assert (await gateway.chat()).status == 200


async def test_an_answer_from_a_cache_of_older_weights_is_asked_again_before_anything_is_shown(two: Replicas) -> None:
    home = await two.home("s")
    engine = two.engines[home]
    engine.version = "1"  # a swap that the gateway has not heard of
    response = await two.ask("s", stream=True)
    exchange = (await two.gateway.recorded(ExchangeCompleted, at_least=2))[1]
    assert response.text == "It is 4."
    assert [call.request.extra_key for call in engine.calls] == ["policy:0", "policy:0", "policy:1"]
    assert len({call.rid for call in engine.calls}) == 3
    assert engine.cancelled == [exchange.exchange_id]
    assert ([span.policy_version for span in exchange.versions], exchange.cached_tokens) == ([1], 0)


async def test_an_engine_whose_versions_outrun_every_key_is_asked_under_one_of_its_own(two: Replicas) -> None:
    home = await two.home("s")
    engine = two.engines[home]
    counts, answer = itertools.count(1), engine.script
    engine.known = {f"policy:{version}" for version in range(9)}

    def swapped(ids: Sequence[int]) -> ScriptedAnswer:
        engine.version = str(next(counts))
        return answer(ids)

    engine.script = swapped
    assert (await two.ask("s")).status == 200
    assert engine.calls[-1].request.extra_key is not None
    assert engine.calls[-1].request.extra_key.startswith("policy:3:")


async def test_a_request_is_asked_of_the_newest_adapter_and_its_tokens_bear_the_adapters_version(two: Replicas) -> None:
    home = await two.home("s")
    await two.engines[home].load_lora("policy-v7", "/adapter")
    await two.tell(home, 7, "policy-v7")
    response = await two.ask("s")
    exchange = (await two.gateway.recorded(ExchangeCompleted, at_least=2))[1]
    assert two.engines[home].calls[-1].request.lora_name == "policy-v7"
    assert [span.policy_version for span in exchange.versions] == [7]
    assert sum(span.num_tokens for span in exchange.versions) == len(exchange.output_ids)
    assert response.headers["x-policy-version"] == "7"


async def test_a_request_keeps_the_adapter_that_it_began_with(two: Replicas) -> None:
    home = await two.home("s")
    engine = two.engines[home]
    await engine.load_lora("policy-v1", "/adapter")
    await two.tell(home, 1, "policy-v1")
    engine.hold()
    asking = asyncio.create_task(two.ask("s"))

    async def running() -> bool:
        return bool(engine.running)

    await until(running)
    await engine.load_lora("policy-v2", "/adapter")
    await two.tell(home, 2, "policy-v2")
    engine.release()
    assert (await asking).status == 200
    await two.ask("s")
    exchanges = await two.gateway.recorded(ExchangeCompleted, at_least=3)
    assert [[span.policy_version for span in exchange.versions] for exchange in exchanges[1:]] == [[1], [2]]
    assert [call.request.lora_name for call in engine.calls[1:]] == ["policy-v1", "policy-v2"]


async def test_an_adapter_that_is_gone_is_not_asked_for_again(two: Replicas) -> None:
    home = await two.home("s")
    await two.tell(home, 7, "policy-v7")  # and the engine has lost it since
    assert (await two.ask("s")).status == 200
    exchange = (await two.gateway.recorded(ExchangeCompleted, at_least=2))[1]
    assert [span.policy_version for span in exchange.versions] == [0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hang", [False, True], ids=["killed", "hanging"])
async def test_a_real_engine_that_fails_under_load_costs_no_request_a_second_retry(tmp_path: Path, hang: bool) -> None:
    figures = await one_fails(tmp_path, sessions=4, steady_s=1.0, hang=hang, ask_every_s=0.2, forked=True)
    assert figures["requests"] > 20
    assert figures["failed_after_retry"] == 0
    assert figures["mislabelled_answers"] == 0
    assert figures["version_after"] == 3
    assert figures["cached_answers"] > 0


class Asker(NamedTuple):
    """Who asks, and whose policy is to answer."""

    key: str | None
    agent: str | None  # as metadata names it
    policy_id: str

    def cached_under(self, adapter: str | None) -> str:
        """The key of its cached prompts."""
        return ":".join(part for part in (self.policy_id, adapter, "0", self.key) if part)


@pytest.mark.parametrize(
    ("adapters", "askers"),
    [
        ("by_key", [Asker(name, None, f"policy+{name}") for name in ("anna", "ben", "cid")]),
        (
            "metadata.agent",
            [*(Asker(None, name, f"policy+{name}") for name in ("anna", "ben", "cid")), Asker(None, None, "policy")],
        ),
        (
            "metadata.agent",
            [
                *(Asker(key, "anna", f"policy+{key}+anna") for key in ("acme", "beta")),
                *(Asker("beta", "cid", "policy+beta+cid"), Asker("beta", None, "policy")),
            ],
        ),
    ],
    ids=["keys", "agents without keys", "agents of one name under two keys"],
)
async def test_each_asker_is_answered_and_recorded_under_its_own_adapter_and_goes_on_without_it(
    tokenizer_folder: Path, tmp_path: Path, adapters: str, askers: Sequence[Asker]
) -> None:
    names = sorted({asker.key for asker in askers if asker.key is not None})
    keys = {name: add_key(tmp_path / "keys.json", name, Allowance()) for name in names}
    first, second, *others = askers
    adapter, newer = f"{first.policy_id}-v3", f"{second.policy_id}-v5"
    async with running_gateway(tokenizer_folder, data_dir=tmp_path, adapters=adapters) as gateway:

        async def ask(asker: Asker) -> Response:
            headers = {} if asker.key is None else {"Authorization": f"Bearer {keys[asker.key]}"}
            return await gateway.chat(headers=headers, metadata={} if asker.agent is None else {"agent": asker.agent})

        for asker, version, name in ((first, 3, adapter), (second, 5, newer)):
            await gateway.engine.load_lora(name, "/adapter")
            event = PolicyActivated(
                policy_id=asker.policy_id, policy_version=version, engine=gateway.engine_url, adapter=name,
                pause_ms=0.0, num_bytes=1, activated_at_ms=version,
            )  # fmt: skip
            await gateway.log.append((event,))

        async def heard() -> bool:
            return (await ask(second)).headers["x-policy-version"] == "5"

        await until(heard)
        gateway.engine.calls.clear()
        before = len(await gateway.recorded(ExchangeCompleted))
        for asker in askers:
            await ask(asker)
        await gateway.engine.unload_lora(adapter)  # between the gateway's last look and the request
        assert (await ask(first)).status == 200
        exchanges = await gateway.recorded(ExchangeCompleted, at_least=before + len(askers) + 1)
    last = sorted(exchanges, key=lambda exchange: exchange.received_at_ms)[-len(askers) - 1 :]
    assert [(e.policy_id, e.versions[0].policy_version) for e in last] == [
        (first.policy_id, 3), (second.policy_id, 5), *((asker.policy_id, 0) for asker in others), (first.policy_id, 0),
    ]  # fmt: skip
    assert [(call.request.lora_name, call.request.extra_key) for call in gateway.engine.calls] == [
        (adapter, first.cached_under(adapter)),
        (newer, second.cached_under(newer)),
        *((None, asker.cached_under(None)) for asker in others),
        (adapter, first.cached_under(adapter)),  # refused, and asked again
        (None, first.cached_under(None)),
    ]
