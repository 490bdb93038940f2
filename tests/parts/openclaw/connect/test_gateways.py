"""What connecting asks the gateway: its context, its model, whether the key opens it, and how OpenClaw reaches it."""

import asyncio
import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from clawstream.config import GatewaySettings, KafkaSettings, PostgresSettings, Settings
from clawstream.errors import ConfigError
from clawstream.local.installation import addresses_in
from clawstream.local.openclaw_config import too_few
from clawstream.local.running import Addresses, alone_on, announced
from tests.parts.engine.tiny_model import make_tokenizer
from tests.parts.gateway.running_gateway import running_gateway, until
from tests.unit.openclaw.connect.texts import Run


async def test_the_gateway_says_how_long_its_context_is_and_has_to_serve_the_model(
    run: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokenizer(tmp_path / "model")
    async with running_gateway(tmp_path / "model") as gateway:
        await until(gateway.ready)
        connecting = await asyncio.to_thread(run, "connect", "--write", "--url", gateway.url)
        assert connecting.exit_code == 0
        written = json.loads(await asyncio.to_thread(file.read_text))
        (model,) = written["models"]["providers"]["clawstream"]["models"]
        _, listed = await gateway.get("/v1/models")
        assert model["contextWindow"] == json.loads(listed)["data"][0]["max_model_len"] != 32_768
        assert model["reasoning"] is json.loads(listed)["data"][0]["reasoning"]
        monkeypatch.setenv("CLAWSTREAM_POLICY__SERVED_MODEL", "another")
        refused = await asyncio.to_thread(run, "connect", "--url", gateway.url)
    assert isinstance(refused.exception, ConfigError)
    assert "serves policy, not 'another'" in str(refused.exception)


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:1/v1"), ("::", "http://127.0.0.1:1/v1"), ("::1", "http://[::1]:1/v1")],
)
def test_openclaw_is_told_an_address_that_it_can_reach(
    run: Run, file: Path, tmp_path: Path, host: str, url: str
) -> None:
    (tmp_path / "clawstream.toml").write_text(f'[gateway]\nport = 1\nhost = "{host}"\napi_key = "s3cret"\n')
    assert run("connect", "--write").exit_code == 0
    assert json.loads(file.read_text())["models"]["providers"]["clawstream"]["baseUrl"] == url


def test_an_installation_says_its_gateway_s_address_as_this_machine_sees_it() -> None:
    gateway = GatewaySettings(host="::", port=7, api_key=SecretStr("s3cret"))
    kafka, postgres = KafkaSettings(bootstrap="127.0.0.1:1"), PostgresSettings(url=SecretStr("postgresql://p"))
    settings = Settings(environment=False, gateway=gateway, kafka=kafka, postgres=postgres)
    assert addresses_in(settings).gateway == "http://127.0.0.1:7"


def test_without_an_address_openclaw_is_told_that_of_the_installation_that_runs(
    run: Run, file: Path, tmp_path: Path
) -> None:
    """With `gateway.port = 0` the settings don't say it."""
    running = Addresses(
        supervisor_pid=1, gateway="http://127.0.0.1:4321", monitor="", engines=(), kafka="", postgres=""
    )
    (tmp_path / "data").mkdir()
    with alone_on(tmp_path / "data"), announced(tmp_path / "data", running):
        assert run("connect", "--write").exit_code == 0
    assert json.loads(file.read_text())["models"]["providers"]["clawstream"]["baseUrl"] == "http://127.0.0.1:4321/v1"


@pytest.mark.parametrize("argv", [(), ("--key", "wrong")])
async def test_a_key_that_opens_nothing_changes_nothing(
    run: Run, file: Path, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    make_tokenizer(tmp_path / "model")
    (tmp_path / "clawstream.toml").write_text("[gateway]\nport = 1\n")
    async with running_gateway(tmp_path / "model", api_key="right") as gateway:
        refused = await asyncio.to_thread(run, "connect", "--write", "--url", gateway.url, *argv)
        assert isinstance(refused.exception, ConfigError)
        assert "HTTP 401" in str(refused.exception)
        assert "--key" in str(refused.exception)
        assert not await asyncio.to_thread(file.exists)
        accepted = await asyncio.to_thread(run, "connect", "--write", "--url", gateway.url, "--key", "right")
        assert accepted.exit_code == 0


async def test_a_context_that_is_too_short_for_openclaw_is_said(run: Run, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model")
    async with running_gateway(tmp_path / "model") as gateway:
        await until(gateway.ready)
        shown = await asyncio.to_thread(run, "connect", "--url", gateway.url)
    assert shown.exit_code == 0
    assert "tokens of context are too few for OpenClaw" in shown.stderr


@pytest.mark.parametrize(("tokens", "too_short"), [(16_384, True), (32_767, True), (32_768, False)])
def test_32768_tokens_of_context_are_enough(tokens: int, too_short: bool) -> None:
    assert (too_few(tokens) is not None) == too_short
