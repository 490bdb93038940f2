"""Python SDKs as their users have them, at the gateway: chat, stream, tools, a schema, an error."""

from pathlib import Path
from typing import Any

import pytest

from clawstream.events import ExchangeCompleted
from tests.parts.gateway.running_gateway import RunningGateway
from tests.system.clients.conftest import SAID, TOTAL
from tests.system.clients.python import seen_by

pytestmark = [pytest.mark.sdks, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("sdks.py")
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
        "structured, with a tool": [TOTAL, 1],
    },
    "instructor": {"structured": TOTAL, "stream": TOTAL, "error": "InstructorRetryException"},
    "smolagents": {"chat": SAID, "stream": SAID, "tool": "add", "error": "BadRequestError"},
    "agents": {
        "chat": SAID, "stream": SAID, "tool": [SAID] * 3, "structured": TOTAL, "error": "BadRequestError",
        "structured, with a tool": [TOTAL, 1],
    },
}  # fmt: skip


@pytest.mark.parametrize("client", EXPECTED)
async def test_what_the_sdk_asks_is_answered(roomy: RunningGateway, client: str) -> None:
    assert await seen_by(client, SCRIPT, roomy.url) == EXPECTED[client]
    exchanges = await roomy.recorded(ExchangeCompleted)
    if client == "agents":
        assert sum(bool(exchange.num_spliced) for exchange in exchanges) >= 3
