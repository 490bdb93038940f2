"""A real vLLM that was not started as docs/vllm.md says; and it is gone when its block ends, with all it started."""

from pathlib import Path

import aiohttp
import psutil
import pytest

from clawstream.errors import TryLater
from clawstream.inference.engine import EngineRefused
from clawstream.inference.vllm import VllmEngine
from clawstream.local.servers.server_process import reserved
from tests.parts.engine.contract.asking import answer, asking
from tests.parts.engine.tiny_model import make_model
from tests.parts.vllm.process import vllm_engine


@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_a_vllm_that_tells_other_logprobs_is_not_asked_and_no_process_of_it_is_left(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    model = make_model(tmp_path / "model", width=128)
    with reserved() as port, vllm_engine(model, port, flags=("--enable-scale-out",), environment=()) as url:
        started = set(psutil.Process().children(recursive=True)) - before
        async with aiohttp.ClientSession() as session:
            engine = VllmEngine(session, url)
            for asked in (answer(engine, asking((40, 41), 1)), engine.server_info()):
                with pytest.raises(TryLater, match=r"another distribution.*--logprobs-mode processed_logprobs"):
                    await asked
            with pytest.raises(EngineRefused, match="VLLM_SERVER_DEV_MODE=1"):
                await engine.pause()
            await engine.resume()
            assert await engine.weight_version() is None
            assert await engine.lora_adapters() == ()
    assert len(started) >= 3  # watcher, server, engine
    assert psutil.wait_procs(started, timeout=5)[1] == []
