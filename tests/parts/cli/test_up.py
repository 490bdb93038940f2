"""What `clawstream up` and `clawstream status` print of the judge and of versions, and that no terminal obeys it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

from clawstream.cli import app, topics, up
from clawstream.config import JudgeSettings, Settings
from clawstream.events import PolicyRejected
from clawstream.inference.judge_client import judge_name
from clawstream.inference.model_folder import fingerprint
from clawstream.local import installation
from clawstream.local.installation import Installation
from clawstream.local.running import Addresses, JudgeNotes
from clawstream.simulation.policy.recipe import RECIPES, folder_of
from clawstream.stream.kafka import connect
from tests.fakes.memory_log import MemoryLog
from tests.parts.judging.endpoint import endpoint
from tests.parts.judging.test_judge_trial import saying
from tests.unit.monitoring.said import activated
from tests.unit.projections.logs import example
from tests.unit.stream.toys import until

NOWHERE = Addresses(
    supervisor_pid=1, kafka="127.0.0.1:1", postgres="", engines=("http://engine",), gateway="http://here", monitor=""
)
RED = "\x1b[31mred"
SHOWN = "\\x1b[31mred"


async def test_up_prints_that_the_judge_gives_no_vote_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, stop = StringIO(), asyncio.Event()

    @asynccontextmanager
    async def running(settings: Settings, **_: object) -> AsyncIterator[Installation]:
        supervisor = cast("Any", SimpleNamespace(failed=asyncio.Event()))
        yield Installation(settings=settings, addresses=NOWHERE, supervisor=supervisor)

    async def context_tokens(_: Installation) -> int:
        return 32_768

    async def tell_versions(*_: object) -> None:
        stop.set()

    monkeypatch.setattr(installation, "installation", running)
    monkeypatch.setattr(up, "_context_tokens", context_tokens)
    monkeypatch.setattr(up, "tell_versions", tell_versions)
    async with endpoint(saying(404, "no such [model]")) as made, asyncio.timeout(20):
        judge = JudgeSettings(url=made.url, model="qwen3-8b")
        settings = Settings(data_dir=tmp_path, judge=judge, environment=False)
        await up.serve_until_stopped(settings, tmp_path, Console(file=said, width=40), stop, config=None)

    assert "the judge gives no vote: " in said.getvalue()
    assert "status 404 (no such [model]). Has it a model qwen3-8b (judge.model)" in said.getvalue()
    assert "`clawstream status` says when it answers" in said.getvalue()


async def test_up_prints_each_version_that_the_log_says_is_served_and_why_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, said = MemoryLog(), StringIO()

    @asynccontextmanager
    async def connected(*_: object, **__: object) -> AsyncIterator[MemoryLog]:
        yield log

    async def written() -> bool:
        await log.append([activated(7), example(PolicyRejected, policy_id="policy", policy_version=8, reason=RED)])
        return "did not take version 8 over" in said.getvalue()

    monkeypatch.setattr(connect, "connected", connected)
    telling = asyncio.create_task(up.tell_versions(Console(file=said, width=40), Settings(environment=False)))
    try:
        await until(written)
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)

    assert said.getvalue().splitlines().count("version 7 is served") == 1
    assert SHOWN in said.getvalue()
    assert "\x1b" not in said.getvalue()


def test_status_has_a_row_of_the_judge_with_its_last_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLAWSTREAM_KAFKA", raising=False)
    url = "http://127.0.0.1:9/v1"
    config = tmp_path / "clawstream.toml"
    config.write_text(f'data_dir = "{tmp_path}"\n[judge]\nurl = "{url}"\nmodel = "qwen3-8b"\n')
    JudgeNotes(tmp_path, judge_name("qwen3-8b", url)).heard(f"status 401, [bold]{RED}")

    text, as_json = (CliRunner().invoke(app, ["-c", str(config), "status", *more]).stdout for more in ([], ["--json"]))

    assert f"judge: {judge_name('qwen3-8b', url)} has given no answer for" in text
    assert f"status 401, [bold]{SHOWN}" in text
    assert "\x1b" not in text
    assert json.loads(as_json)["judge"]["error"] == f"status 401, [bold]{RED}"


def test_the_demo_s_policy_is_served_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[Path, Settings]] = []

    async def serve(settings: Settings, model_path: Path, *_: object, **__: object) -> None:
        served.append((model_path, settings))

    monkeypatch.setattr(topics, "hide_torch", lambda: None)
    monkeypatch.setattr(up, "serve_until_stopped", serve)
    config = tmp_path / "clawstream.toml"
    config.write_text(f'environment = false\ndata_dir = "{tmp_path}/data"\ncache_dir = "{tmp_path}/cache"\n')
    found = CliRunner().invoke(app, ["-c", str(config), "up", "--model", "tiny"])

    assert (found.exit_code, found.output) == (0, ""), found.output
    [(folder, settings)] = served
    assert folder == folder_of(tmp_path / "cache", RECIPES["demo"])
    assert settings.policy.id == f"tiny-{fingerprint(folder)[:8]}"
