"""Python SDKs as their users have them, at the gateway: chat, stream, tools, a schema, an error."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from clawstream.events import ExchangeCompleted
from tests.clients.conftest import SAID, TOTAL
from tests.gateway.house import House

pytestmark = [pytest.mark.sdks, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("sdks.py")
PACKAGES: dict[str, tuple[str, ...]] = {
    "litellm": ("litellm==1.83.0",),
    "langchain": ("langchain==1.4.7", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7"),
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.38.0",),
    "instructor": ("instructor==1.17.0",),
    "smolagents": ("smolagents[openai]==1.26.0",),
    "agents": ("openai-agents==0.24.0",),
}
EXPECTED: dict[str, dict[str, Any]] = {
    "litellm": {
        "chat": SAID, "stream": SAID, "tool": SAID, "structured": TOTAL, "as_anthropic": SAID, "by_responses": SAID,
        "error": "ContextWindowExceededError",
    },
    "langchain": {
        **{f"{api}: {what}": SAID for api in ("chat", "responses", "anthropic") for what in ("chat", "stream", "tool")},
        "chat: error": "OpenAIContextOverflowError", "responses: error": "OpenAIContextOverflowError",
        "anthropic: error": "AnthropicContextOverflowError", "structured": TOTAL,
    },
    "pydantic_ai": {
        **{f"{api}: {what}": SAID for api in ("chat", "responses") for what in ("chat", "stream", "tool")},
        "chat: error": "ModelHTTPError", "responses: error": "ModelHTTPError", "structured": TOTAL,
    },
    "instructor": {"structured": TOTAL, "stream": TOTAL, "error": "InstructorRetryException"},
    "smolagents": {"chat": SAID, "stream": SAID, "tool": "add", "error": "BadRequestError"},
    "agents": {
        "chat": SAID, "stream": SAID, "tool": [SAID] * 3, "structured": TOTAL, "error": "BadRequestError",
    },
}  # fmt: skip


@pytest.mark.parametrize("client", PACKAGES)
async def test_what_the_sdk_asks_is_answered(roomy: House, client: str) -> None:
    assert await seen_by(client, roomy.url) == EXPECTED[client]
    exchanges = await roomy.recorded(ExchangeCompleted)
    if client == "agents":
        assert sum(bool(exchange.num_spliced) for exchange in exchanges) >= 3


async def seen_by(client: str, url: str) -> dict[str, Any]:
    """The JSON that the script prints, in an environment that holds the client's packages."""
    packages = [word for package in PACKAGES[client] for word in ("--with", package)]
    command = ["uv", "run", "--quiet", "--no-project", "--isolated", "--python", "3.11", *packages, "python"]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    process = await asyncio.create_subprocess_exec(
        *command, str(SCRIPT), url, client,
        env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, words = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, words.decode()[-3000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found
