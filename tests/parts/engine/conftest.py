"""The engines that the contract is tested on: the CPU engine, a real SGLang and a real vLLM as processes, the scripted
one here.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiohttp
import pytest
from tokenizers import Tokenizer

from clawstream.inference.http_engine import HttpEngine
from clawstream.inference.sglang import SglangEngine
from clawstream.inference.vllm import VllmEngine
from clawstream.local.servers.server_process import reserved
from tests.fakes import scripted_engine
from tests.fakes.scripted_engine import ScriptedBackend
from tests.parts.engine.process import cpu_engine
from tests.parts.engine.tiny_model import make_model
from tests.parts.sglang.process import sglang_engine
from tests.parts.vllm.process import vllm_engine

NUM_ROWS = 16
# What a real SGLang 0.5.23 does not do on a machine without a GPU, or nowhere.
SGLANG_LACKS = {
    "seeds": "SGLang heeds a seed only with --enable-deterministic-inference, whose attention kernels need a GPU",
    "adapters": "SGLang does not start with --enable-lora where there is no GPU",
    "cache that a swap empties": "SGLang keeps what older weights cached; only another extra_key keeps it away",
    "bounded ids": "SGLang does not check token ids against the vocabulary: one beyond it ends its process",
}
# What a real vLLM 0.32.0 does in another way; contract/test_vllm.py holds it to what it does instead.
VLLM_LACKS = {
    "SGLang's routes": "vLLM has routes of its own",
    "names of requests": "vLLM refuses no request for its name, since it gives each a name of its own",
    "room for the answer": "vLLM cuts an answer to what the context leaves",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine under test: its client, its address, and two folders whose weights it can take."""

    engine: HttpEngine
    dialect: Literal["sglang", "vllm"]
    url: str
    session: aiohttp.ClientSession
    model: Path
    other_model: Path
    decode: Callable[[Sequence[int]], str]
    computes: bool
    lacks: Mapping[str, str]

    async def abort(self, rid: str) -> None:
        """Have the engine end the request, without closing its stream."""
        path, body = {
            "sglang": ("/abort_request", {"rid": rid}),
            "vllm": ("/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{rid}"]}),
        }[self.dialect]
        async with self.session.post(self.url + path, json=body) as aborted:
            assert aborted.status == 200

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


@pytest.fixture(scope="session")
def wide_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two such folders that vLLM takes on the CPU: its kernels know their heads, and they have an output head."""
    folder = tmp_path_factory.mktemp("wide-models")
    first, second = (make_model(folder / f"{seed}", seed=seed, width=128, tied=False) for seed in (0, 1))
    return first, second


@pytest.fixture(scope="session")
def vllm_url(wide_models: tuple[Path, Path]) -> Iterator[str]:
    """The address of a real vLLM that serves the first wide model in 16 rows; one for the whole run."""
    with reserved() as port, vllm_engine(wide_models[0], port, "--max-num-seqs", str(NUM_ROWS)) as url:
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
ON_VLLM = (pytest.mark.vllm, pytest.mark.timeout(900))
COMPUTING = ["cpu", pytest.param("sglang", marks=ON_SGLANG), pytest.param("vllm", marks=ON_VLLM)]


@pytest.fixture(params=["scripted", *COMPUTING])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """Each engine in turn, serving the first model as version "1"."""
    dialect: Literal["sglang", "vllm"] = "vllm" if request.param == "vllm" else "sglang"
    models = request.getfixturevalue("models" if dialect == "sglang" else "wide_models")
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
        client = VllmEngine if dialect == "vllm" else SglangEngine
        engine = client(session, url, silence_s=30, control_s=30)
        if dialect == "vllm":
            await engine.update_weights(str(models[0]), "1")
        yield Subject(
            engine=engine,
            dialect=dialect,
            url=url,
            session=session,
            model=models[0],
            other_model=models[1],
            decode=tokenizer_of(models[0]) if computes else as_characters,
            computes=computes,
            lacks={"sglang": SGLANG_LACKS, "vllm": VLLM_LACKS}.get(request.param, {}),
        )
        if dialect == "vllm":
            await forgotten(engine)
        elif computes:
            await restored(session, url, models[0])


async def forgotten(engine: HttpEngine) -> None:
    """The vLLM runs nothing and has no adapter; the next test gives it its weights."""
    await engine.resume()
    for name in await engine.lora_adapters():
        await engine.unload_lora_adapter(name)


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
