"""The real OpenClaw talks through a real gateway to a real SGLang, whose random weights answer with random words."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from clawstream.conversation.messages import text_of
from clawstream.local.servers.server_process import reserved
from clawstream.projections import database
from clawstream.rendering.renderer import PromptRenderer
from tests.parts.sglang.process import sglang_engine
from tests.renderers import load_renderer
from tests.system.openclaw.client import openclaw_installation
from tests.system.openclaw.conftest import CONTEXT_TOKENS, connected, projected, until
from tests.system.openclaw.policy import make_talker
from tests.system.openclaw.rows import Exchange, exchanges_in, num_common, turns_in

pytestmark = [pytest.mark.openclaw, pytest.mark.sglang, pytest.mark.timeout(900)]
ANSWER_TOKENS = 16
PAGE_TOKENS = 64
BLOCK_BEGINS = "<|im_start|>user\n<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
ASKED = ("What is 2+2?", "Wrong, please show the steps.")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    docs = sorted((openclaw_installation() / "node_modules/openclaw/docs/concepts").glob("*.md"))
    folder = tmp_path_factory.mktemp("talker") / "model"
    folder.mkdir()
    return make_talker(folder, (page.read_text() for page in docs), context_length_tokens=CONTEXT_TOKENS)


@pytest.fixture(scope="module")
def engine_url(model: Path) -> Iterator[str]:
    with reserved() as port, sglang_engine(model, port, "--weight-version", "0") as url:
        yield url


async def test_two_turns_are_answered_recorded_and_paired_and_the_second_goes_on_from_the_first(
    engine_url: str, model: Path, tmp_path: Path, kafka_bootstrap: str, fresh_database_url: str
) -> None:
    database.upgrade(fresh_database_url)
    async with connected(
        tmp_path, engine_url, model, kafka_bootstrap, fresh_database_url, max_answer_tokens=ANSWER_TOKENS
    ) as client:
        shown = [(await client.say("s1", text)).text for text in ASKED]
        await until(lambda: projected(fresh_database_url, len(ASKED)))
    first, second = exchanges_in(fresh_database_url)
    for exchange, text in zip((first, second), shown, strict=True):
        assert exchange.answer is not None, exchange.reason
        assert exchange.session_id == "s1"
        assert exchange.answer["content"] in text
        assert 0 < len(exchange.output_ids) == len(exchange.output_logprobs) <= ANSWER_TOKENS
    _goes_on(load_renderer(model, "qwen3"), first, second)
    turns = turns_in(fresh_database_url, [first, second])
    [(turn_id, said)] = [(turn.turn_id, turn.next_state) for turn in turns.values() if turn.reason is None]
    assert turn_id == first.exchange_id
    assert ASKED[1] in text_of(said[0])


def _goes_on(renderer: PromptRenderer, first: Exchange, second: Exchange) -> None:
    """The prompt of `second` is that of `first` up to the client's block, and then what was sampled, as sampled."""
    num_kept = num_common(first.token_ids, second.token_ids)
    kept = renderer.decode(first.token_ids[:num_kept])
    said_before, block, _ = renderer.decode(first.token_ids).rpartition(BLOCK_BEGINS)
    assert block
    assert ASKED[0] in said_before
    assert kept.startswith(said_before)
    assert second.num_spliced == 1
    rest = second.token_ids[num_kept:]
    places = range(len(rest) - len(first.output_ids) + 1)
    assert any(rest[at : at + len(first.output_ids)] == first.output_ids for at in places)
    assert second.cached_tokens is not None
    assert num_kept - PAGE_TOKENS < second.cached_tokens <= num_kept
