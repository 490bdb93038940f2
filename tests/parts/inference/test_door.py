"""Every part that listens beside the gateway: pages of other sites command nothing and read nothing."""

from pathlib import Path

import aiohttp
import httpx
import pytest
from aiohttp.test_utils import TestServer

from clawstream.config import MonitorSettings
from clawstream.inference.http_borders import refusal
from clawstream.monitoring.app import answering
from clawstream.monitoring.live import MonitorReport
from clawstream.simulation.judge import Service
from clawstream.simulation.opinions import SimulatedJudge
from clawstream.training.checkpoints import _application
from tests.fakes.scripted_engine import ScriptedBackend, counting, serving

EVIL = {"Origin": "https://evil.example"}
REBOUND = {"Host": "evil.example:30100"}
JSON = {"Content-Type": "application/json"}
HERE = "127.0.0.1"


@pytest.mark.parametrize(
    ("method", "headers", "came_in_by", "status"),
    [
        ("POST", {"host": "127.0.0.1:1", "content-type": "application/json", "content-length": "2"}, HERE, None),
        ("POST", {"host": "localhost:1", "content-type": "Application/JSON; charset=utf-8"}, HERE, None),
        ("POST", {"host": "[::1]:1"}, "::1", None),
        ("GET", {"host": "engine:30100"}, "10.0.0.2", None),
        ("GET", {"host": "gpu1.example.com"}, "10.0.0.2", None),
        ("GET", {"host": "gpu1.example.com", "authorization": "Bearer key"}, HERE, None),
        ("GET", {"host": "localhost", "origin": "http://localhost:3000"}, HERE, None),
        ("GET", {"host": "gpu1.example.com"}, HERE, 403),
        ("GET", {}, HERE, 403),
        ("GET", {"host": "localhost", "origin": "https://evil.example"}, HERE, 403),
        ("GET", {"host": "localhost", "origin": "http://["}, HERE, 403),
        ("GET", {"host": "10.0.0.2", "origin": "null"}, "10.0.0.2", 403),
        ("POST", {"host": "localhost", "content-type": "text/plain", "content-length": "2"}, HERE, 415),
        ("POST", {"host": "localhost", "transfer-encoding": "chunked"}, HERE, 415),
        ("PUT", {"host": "localhost", "content-length": "2"}, HERE, 415),
    ],
)
def test_who_is_let_in(method: str, headers: dict[str, str], came_in_by: str, status: int | None) -> None:
    refused = refusal(method, headers, came_in_by)
    assert (None if refused is None else refused.status) == status


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/pause_generation", b'{"mode": "in_place"}', EVIL | {"Content-Type": "text/plain"}, 403),
        ("/pause_generation", b'{"mode": "in_place"}', EVIL | JSON, 403),
        ("/pause_generation", b'{"mode": "in_place"}', REBOUND | JSON, 403),
        ("/pause_generation", b'{"mode": "in_place"}', {"Content-Type": "text/plain"}, 415),
        ("/pause_generation", b"", EVIL, 403),
        ("/generate", b'{"input_ids": [1]}', {"Content-Type": "text/plain"}, 415),
    ],
)
async def test_a_page_does_not_command_an_engine(path: str, body: bytes, headers: dict[str, str], status: int) -> None:
    engine = ScriptedBackend(script=counting(2))
    async with serving(engine) as url, aiohttp.ClientSession() as session:
        async with session.post(url + path, data=body, headers=headers) as answer:
            assert (answer.status, "message" in (await answer.json())["error"]) == (status, True)
        assert (engine.flowing, engine.calls) == (True, [])
        async with session.post(f"{url}/pause_generation", json={"mode": "in_place"}) as answer:
            assert answer.status == 200
        assert not engine.flowing


async def test_no_command_of_an_engine_is_a_get() -> None:
    engine = ScriptedBackend(script=counting(2))
    async with serving(engine) as url, aiohttp.ClientSession() as session:
        for path in ("/generate", "/flush_cache", "/abort_request", "/pause_generation", "/update_weights_from_disk"):
            async with session.get(url + path, headers={"Sec-Fetch-Site": "cross-site"}) as answer:
                assert (path, answer.status) == (path, 405)
    assert (engine.flowing, engine.calls) == (True, [])


def unasked(_now_ms: int) -> MonitorReport:
    raise AssertionError


async def test_a_page_reads_nothing_of_the_monitor_and_of_a_trainer_s_versions(tmp_path: Path) -> None:
    folder = tmp_path / "v000001"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    async with (
        answering(MonitorSettings(port=0), unasked) as port,
        TestServer(_application(tmp_path, None)) as offered,
        aiohttp.ClientSession() as session,
    ):
        for url in (f"http://127.0.0.1:{port}/healthz", str(offered.make_url("/versions/v000001/manifest.json"))):
            for headers, status in (({}, 200), (EVIL, 403), (REBOUND, 403)):
                async with session.get(url, headers=headers) as answer:
                    assert answer.status == status, url


async def test_a_page_asks_no_simulated_judge() -> None:
    transport = httpx.ASGITransport(app=Service(SimulatedJudge(seed=1, wrong_share=0.0), 0.0).app())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        statuses = [(await client.get("/health", headers=headers)).status_code for headers in ({}, EVIL, REBOUND)]
    assert statuses == [200, 403, 403]
