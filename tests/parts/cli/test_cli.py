"""The command line from outside: quick help, exit codes, data on stdout and words on stderr."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from clawstream import cli
from clawstream.cli.learning.progress import shown
from clawstream.cli.openclaw import connecting, wants_key
from clawstream.config import EngineSettings, GatewaySettings, Settings, dump, load
from clawstream.errors import ConfigError, TryLater
from clawstream.gateway.access.key_file import add_key, open_door, revoke_key
from clawstream.gateway.access.keys import Allowance
from clawstream.simulation.runs.run import RunProgress


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


def test_a_peer_that_is_away_is_one_message_with_exit_code_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def away() -> None:
        raise TryLater("Kafka did not let us read: it stops")

    monkeypatch.setattr(cli, "app", away)
    with pytest.raises(SystemExit) as ended:
        cli.main()

    assert ended.value.code == 2
    assert capsys.readouterr().err == "clawstream: Kafka did not let us read: it stops\n"


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
    settings.write_text('[kafka]\nprefix = "a."\n[gateway]\nport = 1\ndefault_temperature = 2\n')
    monkeypatch.setenv("CLAWSTREAM_GATEWAY__PORT", "8080")
    monkeypatch.setenv("CLAWSTREAM_KAFKA", "broker:9092")

    found = load(settings)

    assert (found.gateway.port, found.gateway.default_temperature) == (8080, 2)
    assert (found.kafka.bootstrap, found.kafka.prefix) == ("broker:9092", "a.")


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    settings = tmp_path / "clawstream.toml"
    settings.write_text("[gateway\n")

    with pytest.raises(ConfigError, match=r"clawstream\.toml: not TOML"):
        load(settings)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ('[engine]\nurls = ["http://a:1", "http://user:SECRET@b:1"]\n', "engine.urls.1: "),
        ('[engine]\nurls = ["http://SECRET@b:1"]\n', "engine.urls.0: "),
        ('[engine]\nurls = ["user:SECRET@b:1"]\n', "engine.urls.0: "),
        ('[judge]\nurl = "https://user:SECRET@judge/v1"\n', "judge.url: "),
        ('[training]\nteacher = "http://user:SECRET@teacher"\n', "training.teacher: "),
        ('[weights]\nurl = "http://user:SECRET@gpu:9000"\n', "weights.url: "),
        ('[engine]\nurls = "http://user:SECRET@b:1"\n', "engine.urls"),
        ('[judge]\nurl = ["http://user:SECRET@b:1"]\n', "judge.url"),
        ('[engine]\napi_key = ["SECRET"]\n', "engine.api_key"),
    ],
)
def test_a_secret_in_an_address_is_refused_and_not_repeated(tmp_path: Path, settings: str, key: str) -> None:
    path = tmp_path / "clawstream.toml"
    path.write_text(settings)

    with pytest.raises(ConfigError) as refused:
        load(path)

    assert key in str(refused.value)
    assert "SECRET" not in f"{refused.value} {refused.value.__cause__}"


def test_a_teacher_is_named_or_has_an_address(tmp_path: Path) -> None:
    path = tmp_path / "clawstream.toml"
    path.write_text('[training]\nteacher = "engine"\n')
    with pytest.raises(ConfigError, match=r"training.teacher: .*reference.*http.*\(found 'engine'\)\. Nothing"):
        load(path)


def test_an_address_whose_path_has_an_at_sign_is_one() -> None:
    assert EngineSettings(urls=("http://a:1/@b",)).urls == ("http://a:1/@b",)


def test_the_settings_that_are_shipped_for_production_are_valid_once_their_key_is_one_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped = Path(__file__).parents[3] / "deploy" / "clawstream.toml"
    with pytest.raises(ConfigError, match=r"gateway\.api_key: .*it is 'change-me', as in the examples"):
        load(shipped)
    monkeypatch.setenv("CLAWSTREAM_GATEWAY__API_KEY", "own")
    assert load(shipped).judge.needed == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_the_demo_says_each_update_in_a_line_where_there_is_no_terminal(
    terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with shown(Console(stderr=True, force_terminal=terminal), updates=2) as tell:
        for step in (
            RunProgress(phase="starting the parts"),
            RunProgress(phase="learning", requests=3, tokens_per_s=1.0),
            RunProgress(phase="learning", requests=4, tokens_per_s=1.0),
            RunProgress(phase="learning", update=1, requests=9, score=0.5),
        ):
            tell("", step)
    said = capsys.readouterr()
    lines = ["starting the parts: 0/2 updates", "learning: 0/2 updates, 3 requests"]
    lines.append("learning: 1/2 updates, score 0.50, 9 requests")
    assert said.out == ""
    assert (said.err.splitlines() == lines) == (not terminal)


def test_the_command_that_connects_openclaw_is_named_as_it_has_to_be_typed() -> None:
    here = Settings(environment=False)
    assert connecting(here, "http://127.0.0.1:30000", None) == "clawstream openclaw connect --write"
    moved = Settings(environment=False, gateway={"port": 1, "api_key": "k"})
    assert connecting(moved, "http://127.0.0.1:1", Path("my settings/a.toml")) == (
        f"clawstream -c '{Path.cwd()}/my settings/a.toml' openclaw connect --write --url http://127.0.0.1:1"
    )


def test_up_says_that_openclaw_needs_a_key_where_only_keys_of_the_file_open_the_gateway(tmp_path: Path) -> None:
    settings = Settings(environment=False, data_dir=tmp_path)
    assert not wants_key(settings)
    add_key(settings.keys_file, "claw", Allowance())
    assert wants_key(settings)
    assert not wants_key(Settings(environment=False, data_dir=tmp_path, gateway={"api_key": "k"}))
    revoke_key(settings.keys_file, "claw")
    assert wants_key(settings)
    open_door(settings.keys_file)
    assert not wants_key(settings)


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
    assert f"pip install '{Path(__file__).parents[3]}[monitor]'" in found.stderr
