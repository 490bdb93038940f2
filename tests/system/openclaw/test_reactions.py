"""A real OpenClaw where things do not go smoothly: each reaction is paired with the answer that it is about."""

import re
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from clawstream.conversation.messages import text_of
from clawstream.projections import database
from tests import servers
from tests.fakes.scripted_engine import ScriptedBackend, serving
from tests.renderers import load_renderer
from tests.sessions import Json
from tests.system.openclaw import reactions
from tests.system.openclaw.chatting import chatting
from tests.system.openclaw.conftest import CONTEXT_TOKENS, connected, projected, until
from tests.system.openclaw.policy import Script
from tests.system.openclaw.rows import Exchange, exchanges_in, turns_in
from tests.unit.openclaw import recording

pytestmark = [pytest.mark.openclaw, pytest.mark.timeout(1200)]
_KEY = re.compile(r"\| session=agent:main:(\w+) \|")


@pytest.fixture(scope="module")
def own_database(postgres_url: str) -> Iterator[str]:
    with servers.database(postgres_url, f"reactions_{uuid.uuid4().hex[:12]}") as url:
        database.upgrade(url)
        yield url


@pytest.fixture(scope="module")
async def exchanges(
    tmp_path_factory: pytest.TempPathFactory, kafka_bootstrap: str, own_database: str, model_folder: Path
) -> AsyncIterator[list[Exchange]]:
    """All exchanges of the sessions, told once."""
    renderer = load_renderer(model_folder, "qwen3")
    script = Script(renderer, reactions.LINES)
    engine = ScriptedBackend(
        script=script,
        decode=renderer.decode,
        eos_token_ids=frozenset(renderer.stop_token_ids),
        vocab_size=1 << 20,
        context_length_tokens=CONTEXT_TOKENS,
    )
    home = tmp_path_factory.mktemp("reactions")
    async with (
        serving(engine) as engine_url,
        connected(home, engine_url, model_folder, kafka_bootstrap, own_database) as client,
        chatting(client.port) as chat,
    ):

        def person(session: str) -> reactions.Person:
            workspace = home / ".openclaw" / "workspace"
            return reactions.Person(session=session, chat=chat, engine=engine, workspace=workspace, until=until)

        await reactions.tell(person)
        await until(lambda: projected(own_database, len(engine.calls)))
        assert script.unexpected == []
        yield exchanges_in(own_database)


def test_each_reaction_is_paired_with_the_answer_that_it_is_about(own_database: str, exchanges: list[Exchange]) -> None:
    names = {one.session_id: match[1] for one in exchanges if (match := _KEY.search(_first(one)))}
    turns = turns_in(own_database, exchanges)
    found: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for exchange in exchanges:
        turn = turns.get(exchange.exchange_id)
        if turn is not None and turn.reason is None and exchange.session_id in names:
            assert exchange.answer is not None
            reaction = " / ".join(recording.said(message) for message in turn.next_state)
            found[names[exchange.session_id]].append((shown(exchange.answer), reaction))
    num_paired = sum(len(paired) for paired in found.values())
    print(f"\n{num_paired} of {reactions.NUM_REACTIONS} reactions are paired")
    assert found == reactions.REACTIONS
    assert num_paired == reactions.NUM_REACTIONS >= 30


def _first(exchange: Exchange) -> str:
    return "\n".join(map(text_of, exchange.messages[:2]))


def shown(answer: Json) -> str:
    """What was said; of the answer that was stopped, the client may have got less than was sent."""
    text = recording.said(answer)
    return reactions.LONG.content if reactions.LONG.content.startswith(text) else text
