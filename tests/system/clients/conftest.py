"""A gateway for real clients: a tokenizer and the family's template, and an engine that says what the test wants."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.fakes.scripted_engine import ScriptedAnswer
from tests.parts.engine.tiny_model import make_tokenizer
from tests.parts.gateway.running_gateway import RunningGateway, running_gateway, until

CONTEXT_TOKENS = 8_000
SAID, TOTAL = "It is 4.", {"total": 4}
_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture
async def gateway(tokenizer_folder: Path) -> AsyncIterator[RunningGateway]:
    """One gateway for each test."""
    async with running_gateway(tokenizer_folder) as found:
        yield found


@pytest.fixture
async def roomy(tokenizer_folder: Path) -> AsyncIterator[RunningGateway]:
    """A gateway whose policy calls `add` where it may, once for each question, and says JSON where it is asked to."""
    async with running_gateway(tokenizer_folder) as gateway:
        gateway.engine.context_length_tokens = CONTEXT_TOKENS
        end = gateway.renderer.stop_token_ids[0]

        def script(prompt: Sequence[int]) -> ScriptedAnswer:
            text = gateway.renderer.decode(prompt)
            said = SAID
            if '"name": "add"' in text and "<tool_response>" not in text:
                said = _CALL
            elif "JSON" in text:
                said = json.dumps(TOTAL)
            return ScriptedAnswer(token_ids=(*gateway.renderer.encode(said), end))

        async def told() -> bool:
            return f'"max_model_len":{CONTEXT_TOKENS}' in (await gateway.get("/v1/models"))[1]

        gateway.engine.script = script
        await until(told)
        yield gateway
