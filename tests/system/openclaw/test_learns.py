"""A person corrects a real OpenClaw once, and in new sessions the agent answers as it was told.

`clawstream up` serves and trains SmolLM2 here, each part a process of its own. Only the judge is simulated, as no model
so small can judge: what begins with "no" is a correction to it, and the person's own words are its hint. OpenClaw's
usual prompt, 1,800 tokens even without tools and files, leaves SmolLM2 no sense, so a plugin of OpenClaw's shortens it.
"""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from clawstream.inference.service import AppServer
from clawstream.local.servers import accounts
from clawstream.projections.look.sql import rows_of
from clawstream.simulation.judge import MODEL, Service
from clawstream.simulation.opinions import Reaction, SimulatedJudge
from tests.system.openclaw.client import OpenClaw, openclaw
from tests.system.openclaw.conftest import until
from tests.system.openclaw.processes import clawstream, stages

pytestmark = [pytest.mark.openclaw, pytest.mark.rebuild, pytest.mark.timeout(1500)]
PROMPT = "You are a personal assistant. Answer in a short paragraph."
QUESTION = "What is a mortgage?"
CORRECTION = "no, answer in one short sentence."
SHORT_WORDS = 32  # an untaught answer is a sentence of so few words about once in 16 times
NUM_SESSIONS = 3  # before and after
STARTS_WITHIN_S = 400.0  # SmolLM2 is fetched into the user's cache folder, once
LEARNS_WITHIN_S = 400.0
_PLUGIN = f"""
export default {{
  id: "short-prompt",
  name: "short-prompt",
  register(api) {{ api.on("before_prompt_build", () => ({{ systemPrompt: {json.dumps(PROMPT)} }})); }},
}};
"""


class Attentive:
    """Understands that a person who says no wants something else, and has no words but the person's."""

    inventions: Sequence[str] = ()

    def reaction(self, said: str) -> Reaction:
        return Reaction.WANTS_STYLE if self.hints(said) else Reaction.UNCLEAR

    def hints(self, said: str) -> Sequence[str]:
        return (said.strip(),) if said.strip().startswith("no, ") else ()


@asynccontextmanager
async def judge() -> AsyncIterator[str]:
    """A judge that is never wrong, on this event loop; yields its URL."""
    server = AppServer(Service(SimulatedJudge(wrong_share=0.0, seed=0, listener=Attentive()), latency_ms=0.0).app())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            await serving


def settings(home: Path, kafka: str, prefix: str, database_url: str, judge_url: str) -> str:
    """Of an installation that trains on each correction; its model is the one that is served where none is named."""
    return f"""
        environment = false
        data_dir = "{home / "data"}"
        cache_dir = "{accounts.cache_folder()}"
        kafka = {{ bootstrap = "{kafka}", prefix = "{prefix}" }}
        postgres = {{ url = "{database_url}" }}
        engine = {{ port = 0 }}
        gateway = {{ port = 0 }}
        monitor = {{ port = 0 }}
        judge = {{ url = "{judge_url}", model = "{MODEL}" }}
        training = {{ cadence = "correction" }}
        """


@asynccontextmanager
async def taught(home: Path, kafka: str, prefix: str, database_url: str) -> AsyncIterator[OpenClaw]:
    """An OpenClaw that is connected to `clawstream up`, which trains on each correction."""
    config = home / "clawstream.toml"
    said = config.with_name("up.log")
    with openclaw(home) as client:
        async with judge() as judge_url:
            config.write_text(settings(home, kafka, prefix, database_url, judge_url))
            with stages(config, "up") as runs:

                async def is_up() -> bool:
                    runs()
                    return "Ctrl-C stops everything" in said.read_text()

                await until(is_up, within_s=STARTS_WITHIN_S)
                [url] = re.findall(r"clawstream is up: (http://\S+/v1)", said.read_text())
                connect = ("openclaw", "connect", "--write", "--url", url)
                await asyncio.to_thread(clawstream, config, client.environment, *connect)
                suit_small_model(client)
                with client.gateway():
                    yield client


def suit_small_model(client: OpenClaw) -> None:
    """Configure neither tools nor files nor heartbeats, and a prompt of one line."""
    plugin = client.home / "short-prompt"
    plugin.mkdir()
    manifest = {"id": plugin.name, "name": plugin.name, "configSchema": {"type": "object"}}
    package = {"name": plugin.name, "version": "1.0.0", "type": "module", "openclaw": {"extensions": ["./index.js"]}}
    (plugin / "openclaw.plugin.json").write_text(json.dumps(manifest | {"activation": {"onStartup": True}}))
    (plugin / "package.json").write_text(json.dumps(package))
    (plugin / "index.js").write_text(_PLUGIN)
    found = json.loads(client.config.read_text())
    found["gateway"] = {"mode": "local", "port": client.port, "auth": {"mode": "none"}}
    found["plugins"] = {
        "load": {"paths": [str(plugin)]},
        "entries": {plugin.name: {"enabled": True, "hooks": {"allowConversationAccess": True}}},
    }
    lean = {"skipBootstrap": True, "contextInjection": "never", "skills": []}
    found["agents"]["defaults"] |= lean | {"heartbeat": {"every": "12h", "target": "none"}}
    [model] = found["models"]["providers"]["clawstream"]["models"]
    model |= {"maxTokens": 256, "compat": {"supportsTools": False}}
    client.config.write_text(json.dumps(found))


class Answer(NamedTuple):
    """What the agent said, and the oldest policy version that sampled any of it."""

    text: str
    version: int

    @property
    def as_wished(self) -> bool:
        """Whether it is one short sentence."""
        return len(re.findall(r"[.!?](?=\s|$)|\n+", self.text)) == 1 and len(self.text.split()) <= SHORT_WORDS


def answers_in(url: str) -> list[Answer]:
    """All answers, in the order in which they were asked for."""
    query = (
        "SELECT message->>'content' AS text, (SELECT min((one->>'policy_version')::int) "
        "FROM jsonb_array_elements(versions) one) AS version FROM exchanges ORDER BY received_at_ms, source_offset"
    )
    return [Answer(text=str(row["text"]), version=int(str(row["version"]))) for row in rows_of(url, query)]


async def asked(client: OpenClaw, url: str, sessions: Iterable[str], text: str) -> dict[str, Answer]:
    """Say the same in each session; return what was answered, by session."""
    num_before = len(answers_in(url))
    shown = {session: (await client.say(session, text)).text for session in sessions}

    async def projected() -> bool:
        return len(await asyncio.to_thread(answers_in, url)) == num_before + len(shown)

    await until(projected)
    found = dict(zip(shown, answers_in(url)[num_before:], strict=True))
    assert all(answer.text in shown[session] for session, answer in found.items()), shown
    return found


class Story(NamedTuple):
    """What the agent said in new sessions before and after a person corrected it in one of them."""

    before: dict[str, Answer]
    corrected: Answer
    after: dict[str, Answer]


async def tell(client: OpenClaw, url: str) -> Story:
    """Ask, correct the longest answer, and ask again once a version is served."""

    async def is_served() -> bool:
        return bool(await asyncio.to_thread(rows_of, url, "SELECT 1 FROM activations WHERE policy_version > 0"))

    began = time.monotonic()
    before = await asked(client, url, [f"before-{number}" for number in range(NUM_SESSIONS)], QUESTION)
    print(f"\nasked: {time.monotonic() - began:.0f} s", before)
    longest = max(before, key=lambda session: len(before[session].text))
    await asked(client, url, [longest], CORRECTION)
    print(f"corrected: {time.monotonic() - began:.0f} s")
    await until(is_served, within_s=LEARNS_WITHIN_S)
    print(f"served: {time.monotonic() - began:.0f} s")
    after = await asked(client, url, [f"after-{number}" for number in range(NUM_SESSIONS)], QUESTION)
    print(f"asked again: {time.monotonic() - began:.0f} s", after)
    return Story(before=before, corrected=before[longest], after=after)


async def test_what_a_person_corrects_once_is_what_openclaw_says_in_its_next_sessions(
    tmp_path: Path, kafka_bootstrap: str, topic_prefix: str, fresh_database_url: str
) -> None:
    async with taught(tmp_path, kafka_bootstrap, topic_prefix, fresh_database_url) as client:
        before, corrected, after = await tell(client, fresh_database_url)
    [learned] = rows_of(
        fresh_database_url,
        "SELECT DISTINCT policy_version, sampled_by_versions, hint, answer, next_state FROM lineage "
        "WHERE refreshed_id IS NULL",
    )
    assert sum(answer.as_wished for answer in before.values()) <= 1, before
    assert sum(answer.as_wished for answer in after.values()) >= NUM_SESSIONS - 1, after
    assert {answer.version for answer in before.values()} == {0}
    assert {answer.version for answer in after.values()} == {1}
    assert (learned["policy_version"], learned["sampled_by_versions"]) == (1, [0])
    assert (learned["hint"], learned["answer"]) == (CORRECTION, corrected.text)
    assert CORRECTION in str(learned["next_state"])
