"""The command line from outside: quick help, exit codes, data on stdout and words on stderr."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clawstream.config import GatewaySettings, dump, load
from clawstream.errors import ConfigError


def run(*argv: str, code: str | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code] if code is not None else [sys.executable, "-m", "clawstream", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_needs_neither_torch_nor_transformers_nor_a_broker_client() -> None:
    code = (
        "import sys, clawstream.cli; print(sorted({'torch', 'transformers', 'aiokafka', 'faust'} & set(sys.modules)))"
    )

    assert run(code=code).stdout == "[]\n"


def test_an_unknown_key_in_the_settings_is_named_with_exit_code_two(tmp_path: Path) -> None:
    settings = tmp_path / "clawstream.toml"
    settings.write_text("[gateway]\nprot = 1\n")

    found = run("--config", str(settings), "config")

    assert (found.returncode, found.stdout) == (2, "")
    assert "unknown key gateway.prot" in found.stderr


def test_the_graph_of_topics_goes_to_stdout_and_says_nothing_else() -> None:
    found = run("topics", "graph")

    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("flowchart")


def test_asking_a_folder_where_nothing_ever_ran_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CLAWSTREAM_POSTGRES", "CLAWSTREAM_KAFKA"):
        monkeypatch.delenv(name, raising=False)
    settings = tmp_path / "clawstream.toml"
    settings.write_text(f'data_dir = "{tmp_path / "nothing"}"\n')

    found = run("--config", str(settings), "sql", "SELECT 1")

    assert found.returncode == 2
    assert "clawstream up" in found.stderr


def test_what_waits_in_a_spool_is_told_where_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLAWSTREAM_KAFKA", raising=False)
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "127.0.0.1-30000.spool").write_bytes(b"123")
    (tmp_path / "spool" / "emptied.spool").touch()
    settings = tmp_path / "clawstream.toml"
    settings.write_text(f'data_dir = "{tmp_path}"\n')

    as_json, as_text = (run("--config", str(settings), "status", *more) for more in (["--json"], []))

    assert json.loads(as_json.stdout)["spool_bytes"] == {"127.0.0.1-30000": 3}
    assert "spool 127.0.0.1-30000: 3 bytes wait for Kafka" in as_text.stdout


def test_another_address_than_this_machine_needs_a_key() -> None:
    with pytest.raises(ValueError, match="api_key"):
        GatewaySettings(host="0.0.0.0")


def test_a_variable_overrides_the_file_and_leaves_its_other_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "clawstream.toml"
    settings.write_text('[kafka]\nprefix = "a."\n[gateway]\nport = 1\nack_timeout_s = 2\n')
    monkeypatch.setenv("CLAWSTREAM_GATEWAY__PORT", "8080")
    monkeypatch.setenv("CLAWSTREAM_KAFKA", "broker:9092")

    found = load(settings)

    assert (found.gateway.port, found.gateway.ack_timeout_s) == (8080, 2)
    assert (found.kafka.bootstrap, found.kafka.prefix) == ("broker:9092", "a.")


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    settings = tmp_path / "clawstream.toml"
    settings.write_text("[gateway\n")

    with pytest.raises(ConfigError, match=r"clawstream\.toml: not TOML"):
        load(settings)


def test_the_settings_that_are_shipped_for_production_are_valid() -> None:
    assert load(Path(__file__).parents[2] / "deploy" / "clawstream.toml").judge.needed == 2


def test_a_file_can_shut_the_environment_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "clawstream.toml"
    settings.write_text('environment = false\n[kafka]\nprefix = "a."\n')
    monkeypatch.setenv("CLAWSTREAM_KAFKA", "production:9092")

    assert load(settings).kafka.bootstrap is None


def test_settings_that_are_dumped_and_loaded_again_are_the_same_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "clawstream.toml"
    settings.write_text('[gateway]\napi_key = "secret"\n[engine]\nurls = ["http://127.0.0.1:1"]\n[judge]\nvotes = 5\n')
    before = load(settings)
    (tmp_path / "settings.json").write_text(dump(before))
    monkeypatch.setenv("CLAWSTREAM_JUDGE__VOTES", "7")

    again = load(tmp_path / "settings.json")

    assert again.gateway.api_key is not None
    assert again.gateway.api_key.get_secret_value() == "secret"
    assert again == before.model_copy(update={"environment": False})


def test_a_variable_that_overrides_nothing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWSTREAM_GATEWY__PORT", "1")

    with pytest.raises(ConfigError, match="CLAWSTREAM_GATEWY__PORT"):
        load(None)


def test_a_command_whose_extra_is_not_installed_names_it() -> None:
    found = run(
        code="import sys; sys.modules['faust'] = None; sys.argv = ['clawstream', 'monitor']\n"
        "import clawstream.cli; clawstream.cli.main()"
    )

    assert found.returncode == 2
    assert "pip install 'clawstream[monitor]'" in found.stderr
