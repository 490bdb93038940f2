"""The AI SDK of npm at the gateway, by each of its providers: chat, stream, tools, a schema, an error."""

from collections import Counter
from pathlib import Path

import pytest

from clawstream.events import ExchangeCompleted
from tests.parts.gateway.running_gateway import RunningGateway
from tests.system.clients import javascript
from tests.system.clients.conftest import SAID, TOTAL
from tests.system.clients.turns import paired

pytestmark = pytest.mark.node
CLIENT = Path(__file__).with_name("ai_sdk.cjs")


@pytest.fixture(scope="session")
def modules() -> Path:
    return javascript.ai_sdk()


@pytest.mark.parametrize("provider", ["responses", "chat", "anthropic"])
async def test_each_provider_is_answered_and_its_tool_round_is_paired(
    roomy: RunningGateway, modules: Path, provider: str
) -> None:
    seen = await javascript.run(CLIENT, provider, roomy.url, modules=modules)
    error = {"name": "AI_APICallError", "status": 400}
    said = dict.fromkeys(("chat", "stream", "tool", "second"), SAID)
    assert seen == {**said, "structured": TOTAL, "error": error}
    exchanges = await roomy.recorded(ExchangeCompleted, at_least=5)
    sessions = Counter(exchange.session_id for exchange in exchanges)
    asked = [exchange for exchange in exchanges if sessions[exchange.session_id] > 1]
    assert [len(turn.next_state) for turn in paired(asked)] == [1, 1]
    assert [exchange.num_spliced for exchange in asked] == [0, 1, 2]
