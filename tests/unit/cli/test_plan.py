"""`clawstream plan` says what fits, and refuses what does not with what would."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clawstream.cli import app
from clawstream.errors import ConfigError
from tests.bench.qwen3_sizes import config


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3-4b")))
    return tmp_path


def test_programs_read_of_each_gpu_its_role_its_bytes_by_use_and_whether_it_fits(qwen: Path) -> None:
    shown = CliRunner().invoke(app, ["plan", "--base", str(qwen), "--gpus", "8x80GB", "--json"])
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    assert [gpu["role"] for gpu in told["gpus"]] == ["actor"] * 4 + ["rollout"] * 2 + ["judge"] * 2
    assert (told["fits"], told["training"]["processes"]) == (True, 4)
    for gpu in told["gpus"]:
        assert sum(gpu["bytes_by_use"].values()) < gpu["peak_bytes"] <= gpu["of_bytes"] == 80e9
        assert gpu["fits"] is True


def test_what_does_not_fit_is_shown_all_the_same_and_refused_with_what_would(qwen: Path) -> None:
    shown = CliRunner().invoke(app, ["plan", "--base", str(qwen), "--gpus", "1x24GB", "--json"])
    assert isinstance(shown.exception, ConfigError)
    assert "does not fit on 1x24GB: GPU 0 (actor and rollout) would need" in str(shown.exception)
    assert "x24GB would do" in str(shown.exception)
    assert json.loads(shown.stdout)["fits"] is False


def test_people_read_who_holds_what_and_how_it_is_started(qwen: Path) -> None:
    shown = CliRunner().invoke(app, ["plan", "--base", str(qwen), "--gpus", "8x80GB"])
    assert shown.exit_code == 0, shown.output
    for said in (
        "4.02 billion numbers",
        "0-3",
        "rollout",
        "processes = 4",
        "NUM_GPUS=8 TP=1 PRM_TP=1 clawstream launch",
    ):
        assert said in shown.stdout
    alone = CliRunner().invoke(app, ["plan", "--base", str(qwen), "--gpus", "1x141GB"])
    assert "NUM_GPUS=1 TP=1 PRM_TP=1 clawstream launch" in alone.stdout
    assert "so its engine is started with --mem-fraction-static 0." in alone.stdout
    assert "lora_rank = 16" in alone.stdout
    assert "no GPU is left for a judge" in alone.stderr


def test_gpus_that_the_settings_leave_idle_are_said(qwen: Path) -> None:
    settings = qwen / "clawstream.toml"
    settings.write_text("[training]\nprocesses = 2\n")
    command = ["-c", str(settings), "plan", "--base", str(qwen), "--gpus", "8x141GB"]
    shown = CliRunner().invoke(app, command)
    assert "Left idle, as training.processes is 2: GPU 2, 3." in shown.stdout
    assert json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["idle"] == [2, 3]


def test_a_conversation_longer_than_the_model_s_context_is_refused(qwen: Path) -> None:
    command = ["plan", "--base", str(qwen), "--gpus", "8x80GB", "--context-tokens", "50000"]
    shown = CliRunner().invoke(app, command)
    assert isinstance(shown.exception, ConfigError)
    assert "has a context of 40960" in str(shown.exception)


@pytest.mark.parametrize(
    ("folder", "gpus", "said"),
    [
        ("qwen", "lots", "expected a number up to 64 and a size"),
        ("nowhere", "4x24GB", "no config.json that can be read"),
    ],
)
def test_what_can_not_be_read_is_said(qwen: Path, folder: str, gpus: str, said: str) -> None:
    base = qwen if folder == "qwen" else qwen / folder
    shown = CliRunner().invoke(app, ["plan", "--base", str(base), "--gpus", gpus])
    assert isinstance(shown.exception, ConfigError)
    assert said in str(shown.exception)


def launched(qwen: Path, *words: str, settings: str = "", **variables: str) -> Result:
    file = qwen / "clawstream.toml"
    file.write_text(settings)
    environment = {"HF_CKPT": str(qwen), "NUM_GPUS": "8", "GPU_GB": "80"} | variables
    return CliRunner().invoke(app, ["-c", str(file), "launch", "--dry-run", *words], env=environment)


HALF = '[training]\ndtype = "bfloat16"\ngradient_checkpointing = true\n'


def test_a_launch_that_fits_is_printed_with_the_processes_that_train(qwen: Path) -> None:
    shown = launched(qwen, settings=HALF)
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["processes"] == 4
    assert "not checked" not in shown.stderr


@pytest.mark.parametrize(
    ("variables", "would"),
    [
        ({"GPU_GB": "24"}, "training.lora_rank = 16"),
        ({"GPU_GB": "141", "NUM_GPUS": "2"}, "left out, TP=1 PRM_TP=1 and"),
        ({"GPU_GB": "16", "NUM_GPUS": "2"}, "--gpus 2x16GB` says what would"),
    ],
)
def test_a_launch_that_can_not_fit_is_refused_with_what_would(
    qwen: Path, variables: dict[str, str], would: str
) -> None:
    """As it is set, that is: float32 products and whole activations."""
    refused = launched(qwen, **variables)
    assert isinstance(refused.exception, ConfigError)
    said = str(refused.exception)
    assert "does not fit on" in said
    assert "GPU 0 (actor) would need" in said
    assert would in said
    assert not refused.stdout


def test_the_counts_and_engines_that_are_named_are_those_that_are_weighed(qwen: Path) -> None:
    few = {"ACTOR_GPUS": "1", "ROLLOUT_GPUS": "2", "PRM_GPUS": "0"}
    assert isinstance(launched(qwen, settings=HALF, **few).exception, ConfigError), "one GPU does not hold what four do"
    fits = launched(qwen, settings=HALF, **few | {"ACTOR_GPUS": "6"})
    assert fits.exit_code == 0, fits.output


def test_what_the_arithmetic_can_not_tell_is_launched_unchecked(qwen: Path) -> None:
    shown = launched(qwen, settings='[training]\ntrainer = "megatron"\n')
    assert shown.exit_code == 0, shown.output
    assert "whether it fits is not checked: training.trainer" in shown.stderr


ONE_GPU = HALF + "lora_rank = 16\nmicro_batch_tokens = 16384\n"


def test_one_gpu_is_launched_with_the_share_that_the_plan_has_for_the_engine(qwen: Path) -> None:
    shown = launched(qwen, settings=ONE_GPU, NUM_GPUS="1", GPU_GB="48")
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    assert (told["actor"], told["rollout"], told["judge"], told["processes"]) == ([0], [[0]], [], 1)
    asked = ["-c", str(qwen / "clawstream.toml"), "plan", "--base", str(qwen), "--gpus", "1x48GB", "--json"]
    share = json.loads(CliRunner().invoke(app, asked).stdout)["engine"]["mem_fraction_static"]
    words = told["commands"]["engine-0"].split()
    assert float(words[words.index("--mem-fraction-static") + 1]) == pytest.approx(share, abs=0.01)
    assert "CUDA_VISIBLE_DEVICES=0" in words
    assert "no GPU of 1 is left for a judge" in shown.stderr


def test_several_gpus_leave_the_engine_all_of_its_own(qwen: Path) -> None:
    commands = json.loads(launched(qwen, settings=HALF).stdout)["commands"]
    assert "--mem-fraction-static" not in "".join(commands.values())


@pytest.mark.parametrize(
    ("settings", "gpu_gb", "said"),
    [
        (HALF, "48", "training.lora_rank = 16"),  # all weights do not fit beside an engine
        (ONE_GPU, "24", "GPU 0 (actor and rollout) would need"),
        (ONE_GPU + 'trainer = "megatron"\n', "48", "how much each may take of it is not known: training.trainer"),
    ],
)
def test_what_one_gpu_can_not_hold_or_nobody_can_tell_is_refused(
    qwen: Path, settings: str, gpu_gb: str, said: str
) -> None:
    refused = launched(qwen, settings=settings, NUM_GPUS="1", GPU_GB=gpu_gb)
    assert isinstance(refused.exception, ConfigError)
    assert said in str(refused.exception)
    assert not refused.stdout
