"""The engines that the contract is tested on: the CPU engine as a process, and the scripted one in this process."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

from clawstream.inference import scripted
from clawstream.inference.scripted import ScriptedBackend
from clawstream.inference.sglang import SglangEngine
from clawstream.local.ports import reserved
from tests.engine.process import cpu_engine
from tests.engine.tiny_model import make_model


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


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of one architecture with different weights."""
    folder = tmp_path_factory.mktemp("models")
    return make_model(folder / "first", seed=0), make_model(folder / "second", seed=1)


@pytest.fixture(scope="session")
def cpu_url(models: tuple[Path, Path]) -> Iterator[str]:
    """The address of a CPU engine that serves the first model in 16 rows."""
    options = ("--max-running-requests", "16", "--weight-version", "1")
    with reserved() as port, cpu_engine(models[0], port, *options) as url:
        yield url


def long_speech(input_ids: object) -> scripted.Answer:
    """Enough tokens for every test, none of them an end of text."""
    del input_ids
    return scripted.Answer(token_ids=tuple(range(33, 127)) * 20)


def as_characters(token_ids: Sequence[int]) -> str:
    """The scripted engine's text: a token is a code point."""
    return "".join(map(chr, token_ids))


def tokenizer_of(model: Path) -> Callable[[Sequence[int]], str]:
    """The text of token ids, as the model's tokenizer says."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False))


@pytest.fixture(params=["cpu", "scripted"])
async def subject(request: pytest.FixtureRequest, models: tuple[Path, Path]) -> AsyncIterator[Subject]:
    """Each engine of ours in turn, serving the first model as version "1"."""
    async with AsyncExitStack() as stack:
        computes = request.param == "cpu"
        if computes:
            url = request.getfixturevalue("cpu_url")
        else:
            backend = ScriptedBackend(
                script=long_speech,
                token_delay_s=0.001,
                decode=as_characters,
                model_path=str(models[0]),
                version="1",
            )
            url = await stack.enter_async_context(scripted.serving(backend))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        yield Subject(
            engine=SglangEngine(session, url, silence_s=30, control_s=30),
            url=url,
            session=session,
            model=models[0],
            other_model=models[1],
            decode=tokenizer_of(models[0]) if computes else as_characters,
            computes=computes,
        )
        if computes:
            engine = SglangEngine(session, url)
            await engine.resume()
            await engine.update_weights(str(models[0]), "1")
