"""No engine is asked with a token id that its model has no embedding for."""

import asyncio
import json
from pathlib import Path

import pytest

from clawstream.config import EngineSettings, GatewaySettings, PolicySettings, Settings
from clawstream.errors import ConfigError
from clawstream.gateway import engines
from clawstream.gateway.app import serve
from clawstream.inference.model_folder import largest_token_id, too_small_for
from tests.fakes.memory_log import MemoryLog
from tests.parts.engine.tiny_model import make_tokenizer
from tests.parts.gateway.running_gateway import WITHIN_S, running_gateway, until

NUM_TOKENS = 265  # 256 bytes and Qwen3's nine marks, one of which has the largest id


def configured(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    folder.mkdir()
    assert len(make_tokenizer(folder)) == NUM_TOKENS
    return folder


def settings(folder: Path) -> Settings:
    return Settings(
        engine=EngineSettings(urls=("http://127.0.0.1:1",), model_path=folder),
        policy=PolicySettings(renderer="qwen3"),
        gateway=GatewaySettings(port=0),
    )


@pytest.mark.parametrize(
    "config", [{"vocab_size": NUM_TOKENS - 1}, {"text_config": {"vocab_size": NUM_TOKENS - 1}}], ids=["text", "media"]
)
async def test_a_policy_whose_tokenizer_goes_beyond_its_vocabulary_is_not_served(policy: Path, config: object) -> None:
    configured(policy, config)
    with pytest.raises(
        ConfigError, match=rf"can give id {NUM_TOKENS - 1}, .*vocab_size.* is {NUM_TOKENS - 1}: .*</think>"
    ):
        async with asyncio.timeout(WITHIN_S):
            await serve(settings(policy), MemoryLog(), stop=asyncio.Event())


@pytest.mark.parametrize("vocab_size", [NUM_TOKENS, 4096], ids=["exact", "padded"])
async def test_a_vocabulary_that_holds_every_token_and_more_is_served(policy: Path, vocab_size: int) -> None:
    configured(policy, {"vocab_size": vocab_size})
    async with running_gateway(policy) as gateway:
        assert (await gateway.chat()).status == 200


async def test_an_engine_whose_own_model_is_too_small_is_asked_nothing_until_it_serves_the_policy_s(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ASK_EVERY_S", 0.02)
    small = configured(tmp_path / "small", {"vocab_size": NUM_TOKENS - 1})
    async with running_gateway(policy) as gateway:
        gateway.engine.model_path = str(small)

        async def unready() -> bool:
            return not await gateway.ready()

        await until(unready)
        refused = await gateway.chat()
        assert refused.status == 503
        assert f"vocab_size of {small}" in json.dumps(refused.body)
        assert gateway.engine.calls == []
        gateway.engine.model_path = str(policy)
        await until(gateway.ready)
        assert (await gateway.chat()).status == 200


def test_tokens_that_were_added_to_a_tokenizer_later_count(policy: Path) -> None:
    assert largest_token_id(policy, ()) == NUM_TOKENS - 1
    assert largest_token_id(policy, (7, NUM_TOKENS + 9)) == NUM_TOKENS + 9


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"vocab_size": null}'])
def test_nothing_is_said_of_a_model_whose_size_can_t_be_read(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert too_small_for(10**9, tmp_path) is None
