"""The engines that the contract is tested on: the CPU engine and a real SGLang as processes, the scripted one here."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.server_process import reserved
from tests.fakes import scripted_engine
from tests.fakes.scripted_engine import ScriptedBackend
from tests.parts.engine.process import cpu_engine
from tests.parts.engine.tiny_model import make_model
from tests.parts.sglang.process import sglang_engine

NUM_ROWS = 16
# What a real SGLang 0.5.23 does not do on a machine without a GPU, or nowhere.
SGLANG_LACKS = {
    "seeds": "SGLang heeds a seed only with --enable-deterministic-inference, whose attention kernels need a GPU",
    "adapters": "SGLang does not start with --enable-lora where there is no GPU",
    "cache that a swap empties": "SGLang keeps what older weights cached; only another extra_key keeps it away",
    "bounded ids": "SGLang does not check token ids against the vocabulary: one beyond it ends its process",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine under test: its client, its address, and two folders whose weights it can take."""

    engine: SglangEngine
    url: str
    session: aiohttp.ClientSession
    model: Path
    other_model: Path
    decode: Callable[[Sequence[int]], str]
    computes: bool
    lacks: Mapping[str, str]

    def needs(self, promise: str) -> None:
        """The test goes on only where the engine keeps the promise; else it is skipped, and the reason is shown."""
        if promise in self.lacks:
            pytest.skip(self.lacks[promise])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of one architecture with different weights."""
    folder = tmp_path_factory.mktemp("models")
    return make_model(folder / "first", seed=0), make_model(folder / "second", seed=1)


@pytest.fixture(scope="session")
def cpu_url(models: tuple[Path, Path]) -> Iterator[str]:
    """The address of a CPU engine that serves the first model in 16 rows."""
    options = ("--max-running-requests", str(NUM_ROWS), "--weight-version", "1")
    with reserved() as port, cpu_engine(models[0], port, *options) as url:
        yield url


@pytest.fixture(scope="session")
def sglang_url(models: tuple[Path, Path]) -> Iterator[str]:
    """The address of a real SGLang that serves the first model in 16 rows; one for the whole run."""
    options = ("--max-running-requests", str(NUM_ROWS), "--weight-version", "1")
    with reserved() as port, sglang_engine(models[0], port, *options) as url:
        yield url


def long_speech(input_ids: object) -> scripted_engine.ScriptedAnswer:
    """Enough tokens for every test, none of them an end of text."""
    del input_ids
    return scripted_engine.ScriptedAnswer(token_ids=tuple(range(33, 127)) * 20)


def as_characters(token_ids: Sequence[int]) -> str:
    """The scripted engine's text: a token is a code point."""
    return "".join(map(chr, token_ids))


def tokenizer_of(model: Path) -> Callable[[Sequence[int]], str]:
    """The text of token ids, as the model's tokenizer says."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False))


ON_SGLANG = (pytest.mark.sglang, pytest.mark.timeout(900))  # the first test that asks for it waits for its start


@pytest.fixture(params=["cpu", "scripted", pytest.param("sglang", marks=ON_SGLANG)])
async def subject(request: pytest.FixtureRequest, models: tuple[Path, Path]) -> AsyncIterator[Subject]:
    """Each engine in turn, serving the first model as version "1"."""
    async with AsyncExitStack() as stack:
        computes = request.param != "scripted"
        if computes:
            url = request.getfixturevalue(f"{request.param}_url")
        else:
            backend = ScriptedBackend(
                script=long_speech,
                token_delay_s=0.001,
                decode=as_characters,
                model_path=str(models[0]),
                version="1",
            )
            url = await stack.enter_async_context(scripted_engine.serving(backend))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        yield Subject(
            engine=SglangEngine(session, url, silence_s=30, control_s=30),
            url=url,
            session=session,
            model=models[0],
            other_model=models[1],
            decode=tokenizer_of(models[0]) if computes else as_characters,
            computes=computes,
            lacks=SGLANG_LACKS if request.param == "sglang" else {},
        )
        if computes:
            await restored(session, url, models[0])


async def restored(session: aiohttp.ClientSession, url: str, model: Path) -> None:
    """The engine runs nothing, has nothing cached and serves `model` as version "1"."""
    engine = SglangEngine(session, url)
    await engine.resume()
    async with session.post(f"{url}/abort_request", json={"abort_all": True}) as aborted, asyncio.timeout(30):
        assert aborted.status == 200
        await engine.update_weights(str(model), "1")
        while not await _flushed(session, url):
            await asyncio.sleep(0.1)


async def _flushed(session: aiohttp.ClientSession, url: str) -> bool:
    """False while a request runs; a real SGLang notices after seconds that its client has left."""
    async with session.post(f"{url}/flush_cache") as response:
        return response.status == 200
