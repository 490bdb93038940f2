"""One run of the whole thing: OpenClaw, the gateway, turns and projection as processes, a scripted engine."""

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from clawstream.local.servers.server_process import reserved
from clawstream.projections import database
from clawstream.projections.look.sql import rows_of
from clawstream.rendering.renderer import PromptRenderer
from clawstream.stream.kafka import admin
from tests import servers
from tests.fakes.scripted_engine import Fault, ScriptedBackend, serving
from tests.renderers import load_renderer
from tests.system.openclaw import dialogue
from tests.system.openclaw.client import OpenClaw, openclaw, openclaw_installation
from tests.system.openclaw.policy import Script, make_tokenizer
from tests.system.openclaw.processes import clawstream, stages

CONTEXT_TOKENS = 32_768
WITHIN_S = 120.0
WORDS_TOKENS = 8_500


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What the run left behind."""

    database_url: str
    engine: ScriptedBackend
    script: Script
    replies: dict[str, str]


@pytest.fixture(scope="package")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that knows the words of OpenClaw's own documentation."""
    docs = sorted((openclaw_installation() / "node_modules/openclaw/docs/concepts").glob("*.md"))
    folder = tmp_path_factory.mktemp("policy")
    make_tokenizer(folder, (page.read_text() for page in docs))
    return folder


@pytest.fixture(scope="package")
def openclaw_database(postgres_url: str) -> Iterator[str]:
    with servers.database(postgres_url, f"openclaw_{uuid.uuid4().hex[:12]}") as url:
        database.upgrade(url)
        yield url


@asynccontextmanager
async def connected(
    home: Path, engine_url: str, model: Path, kafka: str, database_url: str, *, max_answer_tokens: int | None = None
) -> AsyncIterator[OpenClaw]:
    """An OpenClaw that `clawstream openclaw connect` pointed at a gateway of its own, and the stages behind it."""
    prefix = f"test-{uuid.uuid4().hex[:12]}."
    await admin.apply(kafka, prefix)
    with reserved() as port, openclaw(home) as client:
        config = home / "clawstream.toml"
        config.write_text(
            f"""
            environment = false
            data_dir = "{home / "data"}"
            kafka = {{ bootstrap = "{kafka}", prefix = "{prefix}" }}
            postgres = {{ url = "{database_url}" }}
            engine = {{ urls = ["{engine_url}"], model_path = "{model}" }}
            gateway = {{ port = {port}, api_key = "openclaw-test-key" }}
            policy = {{ renderer = "qwen3" }}
            """
        )
        with stages(config, "gateway", "turns", "project") as all_run:

            async def ready() -> bool:
                all_run()
                return await _answers(f"http://127.0.0.1:{port}/readyz")

            await until(ready)
            await asyncio.to_thread(clawstream, config, client.environment, "openclaw", "connect", "--write")
            _configure(client, max_answer_tokens)
            with client.gateway():
                yield client


def _configure(client: OpenClaw, max_answer_tokens: int | None) -> None:
    """Settings of OpenClaw's own that the test needs; heartbeats come when they are asked for."""
    found = json.loads(client.config.read_text())
    found["gateway"] = {"mode": "local", "port": client.port, "auth": {"mode": "none"}}
    found["agents"]["defaults"]["heartbeat"] = {"every": "12h", "target": "none"}
    if max_answer_tokens is not None:
        [model] = found["models"]["providers"]["clawstream"]["models"]
        model["maxTokens"] = max_answer_tokens
    client.config.write_text(json.dumps(found))


async def _answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def until(condition: Callable[[], Awaitable[bool]], *, within_s: float = WITHIN_S) -> None:
    """Return once the condition holds."""
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.1)


@pytest.fixture(scope="package")
async def played(
    tmp_path_factory: pytest.TempPathFactory, kafka_bootstrap: str, openclaw_database: str, model_folder: Path
) -> AsyncIterator[Played]:
    """The story, told once."""
    renderer = load_renderer(model_folder, "qwen3")
    script = Script(renderer, dialogue.LINES)
    engine = ScriptedBackend(
        script=script,
        decode=renderer.decode,
        eos_token_ids=frozenset(renderer.stop_token_ids),
        vocab_size=1 << 20,
        context_length_tokens=CONTEXT_TOKENS,
    )
    async with (
        serving(engine) as engine_url,
        connected(
            tmp_path_factory.mktemp("openclaw"), engine_url, model_folder, kafka_bootstrap, openclaw_database
        ) as client,
    ):
        replies = await _tell(client, engine, renderer)
        await until(lambda: projected(openclaw_database, len(engine.calls)))
        yield Played(database_url=openclaw_database, engine=engine, script=script, replies=replies)


async def _tell(client: OpenClaw, engine: ScriptedBackend, renderer: PromptRenderer) -> dict[str, str]:
    replies: dict[str, str] = {}

    async def say(session_id: str, text: str, *, timeout_s: int | None = None) -> None:
        replies[text[:40]] = (await client.say(session_id, text, timeout_s=timeout_s)).text

    async def asked(num_before: int, heard: str) -> None:
        async def heard_it() -> bool:
            script = engine.script
            assert isinstance(script, Script)
            new = engine.calls[num_before:]
            return any(heard in script.heard(call.request.input_ids) for call in new) and not engine.running

        await until(heard_it)

    for text in ("What is 2+2?", "Wrong, please show the steps.", "Thank you."):
        await say("s1", text)
    workspace = client.home / ".openclaw" / "workspace"
    (workspace / "word.txt").write_text("xylophone")
    for text in ("Please look around.", "That is not all, read word.txt", "Good, that is it."):
        await say("s2", text)
    engine.faults.append(Fault(status=503, message="no room"))
    await say("s3", "Please try hard.")
    engine.token_delay_s = 0.02
    await say("s3", "Please talk for long.", timeout_s=5)
    engine.token_delay_s = 0.0
    await say("s3", "What happened?")
    num_before = len(engine.calls)
    await say("s4", "Please delegate.")
    await asked(num_before, dialogue.REPORTED.heard)
    await say("s4", "Thank you.")
    await client.run("agent", "--session-key", "agent:main:main", "--message", "Hello there.")
    num_before = len(engine.calls)
    await client.run("system", "event", "--text", "The door is open", "--mode", "now")
    await asked(num_before, dialogue.POLLED.heard)
    await client.run("agent", "--session-key", "agent:main:main", "--message", "Use a tool now.")
    await client.run("agent", "--session-key", "agent:main:main", "--message", "Thank you.")
    num_before = len(engine.calls)
    await say("s5", f"Study this:\n{_words(renderer)}")
    await asked(num_before, dialogue.FLUSHED.heard)
    await say("s5", "What was it about?")
    await say("s5", f"Study this too:\n{_words(renderer)}")
    await say("s5", "Are you still here?")
    return replies


def _words(renderer: PromptRenderer) -> str:
    """So much text that two of it fill a context."""
    text = " ".join(f"word {number}" for number in itertools.islice(itertools.count(1000), WORDS_TOKENS // 3))
    return text[: len(text) * WORDS_TOKENS // len(renderer.encode(text))]


async def projected(url: str, num_exchanges: int) -> bool:
    """Whether so many exchanges stand in Postgres."""
    rows = await asyncio.to_thread(rows_of, url, "SELECT count(*) AS n FROM exchanges")
    return bool(rows[0]["n"] == num_exchanges)
