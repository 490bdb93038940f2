"""What a real engine computes of a prompt that goes on: its own count of what was in its cache says it."""

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from clawstream.events import ExchangeCompleted
from clawstream.local.servers.server_process import reserved
from tests import recorded
from tests.parts.engine.process import cpu_engine
from tests.parts.engine.tiny_model import make_model
from tests.parts.gateway.running_gateway import RunningGateway, everything, running_gateway, until
from tests.sessions import Json, assistant, history, user

pytestmark = pytest.mark.slow

PAGE_TOKENS = 64  # of SGLang's prefix cache at most; the CPU engine's has no pages
SEEDS = range(20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def engine_url(model: Path) -> Iterator[str]:
    with reserved() as port, cpu_engine(model, port) as url:
        yield url


@pytest.fixture
async def gateway(model: Path, engine_url: str) -> AsyncIterator[RunningGateway]:
    async with running_gateway(model, engine_urls=(engine_url,)) as found:
        await until(found.ready)
        yield found


class Turn(NamedTuple):
    """An answer of random weights with no mark of the template in it, and the tokens cached when it was first asked."""

    said: str
    exchange: ExchangeCompleted
    cached_tokens: int


async def ask(gateway: RunningGateway, messages: Sequence[Json], session: str) -> Turn:
    """Ask until there is one."""
    cached_tokens: int | None = None
    for seed in SEEDS:
        body = await gateway.chat(
            messages, headers={"X-Session-Id": session}, seed=seed, temperature=1.0, max_tokens=30
        )
        exchange = [event for event in await everything(gateway.log) if isinstance(event, ExchangeCompleted)][-1]
        cached_tokens = exchange.cached_tokens if cached_tokens is None else cached_tokens
        assert cached_tokens is not None
        if gateway.renderer.marker_ids.isdisjoint(exchange.output_ids):
            return Turn(str(body.body["choices"][0]["message"]["content"]), exchange, cached_tokens)
    raise AssertionError(f"no answer without marks with any of {len(SEEDS)} seeds")


async def whole_prompt(gateway: RunningGateway, exchange: ExchangeCompleted) -> tuple[int, ...]:
    exchanges = [event for event in await everything(gateway.log) if isinstance(event, ExchangeCompleted)]
    return history(exchanges)[exchange.exchange_id].token_ids


async def test_of_a_second_turn_the_engine_has_the_prompt_and_the_answer(gateway: RunningGateway) -> None:
    first = await ask(gateway, [user("What is 2+2?")], "plain")
    second = await ask(gateway, [user("What is 2+2?"), assistant(first.said), user("Go on.")], "plain")
    so_far = await whole_prompt(gateway, first.exchange) + first.exchange.output_ids
    assert second.exchange.num_spliced == 1
    assert (await whole_prompt(gateway, second.exchange))[: len(so_far)] == so_far
    assert second.cached_tokens >= len(so_far) - PAGE_TOKENS


async def test_of_openclaw_s_turns_the_engine_computes_the_answer_what_is_new_and_the_block(
    gateway: RunningGateway,
) -> None:
    asked = recorded.FIRST_TURN[:-1]
    before = await ask(gateway, [*asked, recorded.BLOCK], "s1")
    for number in (1, 2, 3):
        new = user(f"[Fri 2026-11-20 12:1{number} UTC] Wrong.")
        asked = [*asked, assistant(before.said), new]
        turn = await ask(gateway, [*asked, recorded.BLOCK], "s1")
        num_tokens = len(await whole_prompt(gateway, turn.exchange))
        shown = gateway.renderer.prompt_ids([new, recorded.BLOCK], {})
        allowed = len(before.exchange.output_ids) + len(shown) + PAGE_TOKENS
        assert turn.exchange.num_spliced == number
        assert num_tokens - turn.cached_tokens <= allowed < num_tokens
        before = turn
