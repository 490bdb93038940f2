"""`clawstream replay` and `train --samples` from outside, on a real broker."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Outgoing
from tests.parts.replay.making import DEMO, Maker, demo_model

NUM_SESSIONS = 3
NUM_TURNS = NUM_SESSIONS * (DEMO.num_exchanges - 1)

pytestmark = pytest.mark.timeout(300)  # a worker of a replay, and the trainer, import for seconds


def run(config: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "clawstream", "-c", str(config), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=clean_environment())


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("CLAWSTREAM_")}


@pytest.fixture
async def config(tmp_path: Path, kafka_bootstrap: str, topic_prefix: str) -> Path:
    """Settings of an installation whose log holds sessions that were judged."""
    await admin.apply(kafka_bootstrap, topic_prefix)
    model_path = policy(tmp_path / "model")
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log:
        for exchanges, votes in Maker(model_path, DEMO).sessions(NUM_SESSIONS):
            await log.write([Outgoing(event) for event in [*exchanges, *votes]])
    path = tmp_path / "clawstream.toml"
    path.write_text(
        f'data_dir = "{tmp_path}"\n[kafka]\nbootstrap = "{kafka_bootstrap}"\nprefix = "{topic_prefix}"\n'
        f'[engine]\nmodel_path = "{model_path}"\n[judge]\nvotes = 3\n[training]\nbatch_samples = 4\n'
    )
    return path


def policy(folder: Path) -> Path:
    """The demo's tokenizer, and random weights that read it."""
    demo_model(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def run_all(config: Path, *commands: tuple[str, ...]) -> list[tuple[int, str, str]]:
    """Return the exit code, stdout and stderr of each command, run one after the other in a process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.parts.replay.commands"],
        input=json.dumps([("-c", str(config), *argv) for argv in commands]),
        capture_output=True, text=True, timeout=200, check=False, env=clean_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [(code, out, words) for code, out, words in json.loads(done.stdout)]


@pytest.mark.slow
def test_a_log_is_replayed_compared_promoted_and_trained_on_by_commands(config: Path) -> None:
    started = run(config, "replay", "start", "--name", "again", "--workers", "1", "--json")
    assert started.returncode == 0, started.stderr
    said = json.loads(started.stdout)
    assert (said["num_exchanges"], said["num_samples"]) == (NUM_SESSIONS * DEMO.num_exchanges, NUM_TURNS)

    again, listed, comparison, promotion, pointed, rollback, nothing = run_all(
        config,
        ("replay", "start", "--name", "again", "--json"),
        ("replay", "list", "--json"),
        ("replay", "compare", "again", "--json"),
        ("replay", "promote", "again"),
        ("replay", "list", "--json"),
        ("replay", "rollback"),
        ("replay", "rollback"),
    )
    assert json.loads(again[1]) == said
    [row] = json.loads(listed[1])
    assert (row["name"], row["state"], row["samples_sha256"]) == ("again", "ended", said["samples_sha256"])
    compared = json.loads(comparison[1])
    assert compared["turns_missing_in_replay"] == 0
    assert len(Path(compared["csv"]).read_text().splitlines()) == 1 + NUM_TURNS
    assert Path(compared["plot"]).read_bytes().startswith(b"\x89PNG")
    assert "replay again" in promotion[1]
    assert json.loads(pointed[1])[0]["state"] == "promoted"
    assert "its live samples" in rollback[1]
    assert (nothing[0], "nothing is promoted" in nothing[2]) == (2, True)

    trained = run(config, "train", "--samples", "again")
    assert trained.returncode == 0, trained.stderr
    assert "policy-again is at version 3" in trained.stdout  # four, four and one of nine samples
    plan = json.loads((config.parent / "policies" / "policy-again" / "v000003" / "manifest.json").read_text())["plan"]
    assert plan["replay"] == "again"


@pytest.mark.slow
def test_what_an_operator_gets_wrong_is_said_and_begins_nothing(config: Path) -> None:
    wrong = {
        ("replay", "start", "--name", "A B"): "can't be named 'A B'",
        ("replay", "start", "--name", "x", "--from", "soon"): "soon",
        ("replay", "start", "--name", "x", "--from", "1000000"): "no exchange stands on the log",
        ("replay", "start", "--name", "x", "--votes-from", "new"): "no judge is named",
        ("replay", "promote", "x"): "no replay 'x'",
        ("train", "--samples", "x"): "no replay 'x'",
        ("replay", "start", "--name", "busy"): "by another process",
    }
    folder = config.parent / "replays" / "busy"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        *ended, listed = run_all(config, *wrong, ("replay", "list", "--json"))
    for (argv, words), (code, out, said) in zip(wrong.items(), ended, strict=True):
        assert (code, out) == (2, ""), (argv, said)
        assert words in said, argv
    assert json.loads(listed[1]) == []
