"""What an installation is made of: its ports, its engines, its stages, and when each part is ready."""

from contextlib import ExitStack, nullcontext
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
    PostgresSettings,
    Settings,
    TrainingSettings,
    WeightsSettings,
)
from clawstream.errors import PartUnavailable
from clawstream.local import installation
from clawstream.local.installation import STAGES, _elsewhere, _engines, _with_database, _with_ports
from clawstream.local.keeping import Server
from clawstream.local.servers.ports import reserved
from clawstream.local.servers.ready import answers
from clawstream.local.supervisor import Patience, Supervisor
from clawstream.simulation.policy.base import base_policy


async def test_each_replica_is_an_engine_of_its_own_on_a_port_of_its_own(tmp_path: Path) -> None:
    asked = Settings(
        engine=EngineSettings(port=0, replicas=3), gateway=GatewaySettings(port=0), monitor=MonitorSettings(port=0)
    )
    with ExitStack() as stack:
        filled = _with_ports(asked, tmp_path, stack)
    async with aiohttp.ClientSession() as http:
        parts = _engines(tmp_path / "settings.json", http, filled.engine.urls)

    assert [part.name for part in parts] == ["engine", "engine-2", "engine-3"]
    assert [f"http://127.0.0.1:{part.command[-1]}" for part in parts] == list(filled.engine.urls)
    assert len({part.command[-1] for part in parts}) == 3
    assert filled.engine.urls[0] == f"http://127.0.0.1:{filled.engine.port}"


def test_replicas_take_the_ports_after_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "reserved", lambda port, **_setting: nullcontext(port))
    filled = _with_ports(Settings(engine=EngineSettings(port=31000, replicas=2)), tmp_path, ExitStack())
    assert filled.engine.urls == ("http://127.0.0.1:31000", "http://127.0.0.1:31001")


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
        engine=EngineSettings(port=0, loads_within_s=12_345),
        gateway=GatewaySettings(port=0),
        monitor=MonitorSettings(port=0),
        environment=False,
    )
    with pytest.raises(PartUnavailable, match="nothing is started here"):
        async with installation.installation(settings, model_path=tmp_path, say=print):
            pass
    assert [patience.ready_within_s for patience in built] == [12_345]


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
    assert ["train" in _elsewhere(settings) for settings in (here, elsewhere)] == [False, True]


@pytest.mark.parametrize(
    ("training", "runs"),
    [
        (TrainingSettings(), False),
        (TrainingSettings(late="refresh"), True),
        (TrainingSettings(answers_per_hint=2), True),
    ],
)
def test_prompts_are_answered_anew_here_only_where_the_settings_want_it(
    training: TrainingSettings, *, runs: bool
) -> None:
    assert ("refresh" in STAGES, "refresh" in _elsewhere(Settings(training=training))) == (True, not runs)


async def test_the_port_that_the_settings_name_is_the_one_the_embedded_database_listens_on(tmp_path: Path) -> None:
    with reserved() as port:
        pass
    asked = Settings(data_dir=tmp_path, postgres=PostgresSettings(port=port), environment=False)
    servers: list[Server] = []
    with ExitStack() as stack:
        found = await _with_database(asked, stack, servers.append, fresh=False, say=lambda _: None)
        assert found.url is not None
        assert (found.port, make_url(found.url.get_secret_value()).port, len(servers)) == (port, port, 1)
        with psycopg.connect(found.url.get_secret_value().replace("+psycopg", "")) as connection:
            row = connection.execute("SELECT inet_server_port()").fetchone()
        assert row == (port,)


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
