"""`clawstream launch` as a user runs it, SGLang's servers stood in for by the CPU engine, which speaks its dialect."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from clawstream.errors import PartUnavailable
from clawstream.local.servers.server_process import reserved
from tests.parts.engine.tiny_model import make_model

# SGLang's arguments, of which the CPU engine knows two; it has no GPU to be given and says which it was.
SERVER = """#!{python}
import os, sys
arguments = dict(zip(sys.argv[1::1], sys.argv[2::1]))
print("gpus", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
known = [arguments[name] for name in ("--model-path", "--port")]
os.execv({python!r}, [{python!r}, "-m", "clawstream.local.engine", "--model-path", known[0], "--port", known[1]])
"""


def environment(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("CLAWSTREAM_")} | variables


def launch(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "clawstream", "launch", *arguments],
        env=environment(**variables), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_dry_run_reads_the_variables_of_openclaw_rl_and_prints_who_gets_what(tmp_path: Path) -> None:
    model = make_model(tmp_path / "policy", seed=0)
    shown = launch(
        "--dry-run", HF_CKPT=str(model), NUM_GPUS="8", ROLLOUT_GPUS="2", PRM_GPUS="2", ACTOR_GPUS="4", TP="2"
    )
    assert shown.returncode == 0, shown.stderr
    told = json.loads(shown.stdout)
    assert (told["actor"], told["rollout"], told["judge"]) == ([0, 1, 2, 3], [[4, 5]], [6, 7])
    assert told["processes"] == 4
    assert f"--model-path {model} --host 127.0.0.1 --port 30010 --tp-size 2" in told["commands"]["engine-0"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NUM_GPUS": "1", "PRM_GPUS": "1"}, "NUM_GPUS is 1"),
        ({"ACTOR_GPUS": "2", "ROLLOUT_GPUS": "3", "TP": "2"}, "TP that divides it"),
    ],
)
def test_counts_that_do_not_fit_are_an_operators_error(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    refused = launch("--dry-run", HF_CKPT=str(make_model(tmp_path / "policy", seed=0)), **variables)
    assert refused.returncode == 2
    assert said in " ".join(refused.stderr.split())


def test_two_gpus_train_and_serve_and_it_is_said_that_none_judges(tmp_path: Path) -> None:
    shown = launch("--dry-run", HF_CKPT=str(make_model(tmp_path / "policy", seed=0)), NUM_GPUS="2")
    assert shown.returncode == 0, shown.stderr
    told = json.loads(shown.stdout)
    assert (told["actor"], told["rollout"], told["judge"]) == ([0], [[1]], [])
    assert "no GPU of 2 is left for a judge (PRM_GPUS)" in shown.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("counts", "gpus"),
    [
        ({"NUM_GPUS": "3", "ACTOR_GPUS": "1", "ROLLOUT_GPUS": "2", "PRM_GPUS": "0"}, ["1", "2"]),
        ({"NUM_GPUS": "1", "GPU_GB": "24"}, ["0"]),
    ],
    ids=["several", "one"],
)
def test_engines_and_everything_else_come_up_and_stop_together(
    tmp_path: Path, counts: dict[str, str], gpus: list[str]
) -> None:
    model = make_model(tmp_path / "policy", seed=0)
    server = tmp_path / "sglang"
    server.write_text(SERVER.format(python=sys.executable))
    server.chmod(0o755)
    settings = tmp_path / "clawstream.toml"
    with two_ports() as port:
        settings.write_text(
            f'data_dir = "{tmp_path / "data"}"\n[monitor]\nport = 0\n[policy]\nrenderer = "qwen3"\n'
            f"[engine]\nport = {port}\n"
        )
        command = [sys.executable, "-m", "clawstream", "-c", str(settings), "launch", "--sglang", str(server)]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment(HF_CKPT=str(model), PORT="0", **counts)
        )
        assert process.stderr is not None
        said = ""
        try:
            while "Ctrl-C stops everything" not in said and (line := process.stderr.readline()):
                said += line
            found = re.search(r"clawstream is up: (http://[0-9.:]+)/v1", said)
            assert found is not None, said
            with urllib.request.urlopen(f"{found[1]}/readyz", timeout=10) as response:
                assert len([part for part in json.load(response)["parts"] if part.startswith("engine")]) == len(gpus)
            logs = tmp_path / "data" / "servers" / "logs"
            first = [(logs / f"engine-{n}.log").read_text().splitlines()[0] for n in range(len(gpus))]
            assert first == [f"gpus {number}" for number in gpus]
        finally:
            process.send_signal(signal.SIGINT)
            said += process.communicate(timeout=60)[1]
    assert process.returncode == 0, said
    assert "nothing was lost" in said


@contextmanager
def two_ports() -> Iterator[int]:
    """Keep two neighbouring ports free for whoever is told the first."""
    while True:
        with reserved() as port, suppress(PartUnavailable), reserved(port + 1):
            yield port
            return
