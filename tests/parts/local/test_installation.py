"""What an installation is made of: its ports, its engines, its stages, and when each part is ready."""

from contextlib import ExitStack
from pathlib import Path

import aiohttp
import psutil
import psycopg
import pytest
from aiohttp import test_utils, web
from sqlalchemy.engine import make_url

from clawstream.config import (
    EngineSettings,
    GatewaySettings,
    MonitorSettings,
    Settings,
    TrainingSettings,
    WeightsSettings,
)
from clawstream.errors import PartUnavailable
from clawstream.inference.http_engine import LOADS_WITHIN_S
from clawstream.local import installation
from clawstream.local.installation import STAGES, _stages, _with_database, _with_ports
from clawstream.local.servers.kafka import EmbeddedKafka
from clawstream.local.servers.postgres import EmbeddedPostgres
from clawstream.local.servers.server_process import answers, reserved
from clawstream.local.supervisor import Patience, RestartableServer, Supervisor
from clawstream.simulation.policy.recipe import base_policy


def test_the_embedded_engine_is_at_the_port_that_was_kept_for_it(tmp_path: Path) -> None:
    asked = Settings(engine=EngineSettings(port=0), gateway=GatewaySettings(port=0), monitor=MonitorSettings(port=0))
    with ExitStack() as stack:
        filled = _with_ports(asked, tmp_path, stack)
    assert filled.engine.port > 0
    assert filled.engine.urls == (f"http://127.0.0.1:{filled.engine.port}",)


async def test_a_port_that_is_taken_is_named_before_any_server_is_started(tmp_path: Path) -> None:
    said: list[str] = []
    with reserved() as port:
        taken = Settings(data_dir=tmp_path, engine=EngineSettings(port=port), environment=False)
        with pytest.raises(PartUnavailable, match=rf"port {port} of .* \(engine\.port\)"):
            async with installation.installation(taken, model_path=tmp_path, say=said.append):
                pass
    assert said == []


async def test_the_supervisor_waits_as_long_as_an_engine_may_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Patience] = []

    def supervisor(*_given: object, patience: Patience = Patience(), **_more: object) -> Supervisor:  # noqa: B008
        built.append(patience)
        raise PartUnavailable("nothing is started here")

    monkeypatch.setattr(installation, "Supervisor", supervisor)
    settings = Settings(
        data_dir=tmp_path,
        engine=EngineSettings(port=0),
        gateway=GatewaySettings(port=0),
        monitor=MonitorSettings(port=0),
        environment=False,
    )
    with pytest.raises(PartUnavailable, match="nothing is started here"):
        async with installation.installation(settings, model_path=tmp_path, say=print):
            pass
    assert [patience.ready_within_s for patience in built] == [LOADS_WITHIN_S]
    assert LOADS_WITHIN_S >= 600  # a model of 30 GB from a slow disk


async def test_a_page_that_is_not_ready_says_what_it_lacks() -> None:
    pages = {
        "/readyz": web.json_response(
            {"missing": [{"part": "engine", "problem": "engine http://e is away"}]}, status=503
        ),
        "/health": web.Response(status=503, text="loading"),
        "/fine": web.Response(),
    }

    async def page(request: web.Request) -> web.Response:
        return pages[request.path]

    app = web.Application()
    for path in pages:
        app.router.add_get(path, page)
    async with test_utils.TestServer(app) as server, aiohttp.ClientSession() as http:
        url = str(server.make_url("")).rstrip("/")
        assert await answers(http, f"{url}/readyz")() == "engine http://e is away"
        assert await answers(http, f"{url}/health")() == f"{url}/health answers HTTP 503"
        assert await answers(http, f"{url}/fine")() is None
    async with aiohttp.ClientSession() as http:
        assert await answers(http, f"{url}/fine")() == f"{url}/fine does not answer"


def test_a_trainer_on_another_machine_is_not_started_here_too() -> None:
    here, elsewhere = Settings(), Settings(weights=WeightsSettings(url="http://127.0.0.1:30067"))
    assert ["train" in _stages(settings) for settings in (here, elsewhere)] == [True, False]


@pytest.mark.parametrize(
    ("training", "runs"),
    [
        (TrainingSettings(), True),
        (TrainingSettings(rehearsal_share=0.0), False),
        (TrainingSettings(method="binary"), False),
        (TrainingSettings(rehearsal_share=0.0, late="refresh"), True),
        (TrainingSettings(rehearsal_share=0.0, answers_per_hint=2), True),
    ],
)
def test_prompts_are_answered_again_here_only_where_the_settings_want_it(
    training: TrainingSettings, *, runs: bool
) -> None:
    assert ("refresh" in STAGES, "refresh" in _stages(Settings(training=training))) == (True, runs)


async def test_the_embedded_database_has_the_same_address_at_each_start(tmp_path: Path) -> None:
    asked = Settings(data_dir=tmp_path, environment=False)
    servers: list[RestartableServer] = []
    urls = []
    for _ in range(2):
        with ExitStack() as stack:

            async def start(server: EmbeddedKafka | EmbeddedPostgres, stack: ExitStack = stack) -> None:
                stack.enter_context(server)
                servers.append(server)

            found = await _with_database(asked, start, fresh=False)
            assert found.url is not None
            urls.append(found.url.get_secret_value())
            with psycopg.connect(urls[-1].replace("+psycopg", "")) as connection:
                row = connection.execute("SELECT inet_server_port()").fetchone()
            assert row == (make_url(urls[-1]).port,)
    assert (urls[0], len(servers)) == (urls[1], 2)


@pytest.mark.slow
async def test_a_broker_that_does_not_start_is_told_and_what_was_started_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text("#!/bin/sh\necho no heap today\nexit 3\n")
    (home / "bin" / "java").chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(home))
    asked = Settings(
        data_dir=tmp_path / "data",
        engine=EngineSettings(port=0),
        gateway=GatewaySettings(port=0),
        monitor=MonitorSettings(port=0),
        environment=False,
    )
    with pytest.raises(PartUnavailable, match=r"could not be formatted: exit status 3(.|\n)*no heap today"):
        async with installation.installation(asked, model_path=base_policy(asked.cache_dir), say=lambda _: None):
            pass
    assert not (asked.data_dir / "postgres" / "data" / "postmaster.pid").exists()
    left = [one for one in psutil.Process().children(recursive=True) if str(asked.data_dir) in " ".join(one.cmdline())]
    assert left == []
