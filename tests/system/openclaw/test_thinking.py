"""Whether the served model thinks, as OpenClaw is told when it is connected."""

import asyncio
from pathlib import Path

import pytest

from clawstream.cli.openclaw import _served
from tests.parts.engine.tiny_model import make_tokenizer
from tests.parts.gateway.running_gateway import running_gateway


@pytest.mark.parametrize("thinks", [True, False])
async def test_the_gateway_says_whether_its_model_thinks_and_connect_is_told(tmp_path: Path, thinks: bool) -> None:
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.chat_template = "{{ messages[0].content }}" + "<think>" * thinks
    tokenizer.save_pretrained(tmp_path)
    async with running_gateway(tmp_path) as gateway:
        assert await asyncio.to_thread(_served, f"{gateway.url}/v1", "none", "policy") == (2048, thinks)
