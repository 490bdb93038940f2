"""Which model `clawstream up` serves, and which settings it chooses for one of our own where none is set."""

from pathlib import Path

import pytest

from clawstream.cli.topics import Own, suited, which_model
from clawstream.config import EngineSettings, Settings, TrainingSettings, load
from clawstream.errors import ConfigError
from clawstream.simulation.policy.recipe import LEARNING_RATE

HASH = "0123456789abcdef"


@pytest.fixture
def unsaid(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, environment=False)


def said(tmp_path: Path, text: str) -> Settings:
    config = tmp_path / "clawstream.toml"
    config.write_text(f'environment = false\ndata_dir = "{tmp_path}"\n{text}')
    return load(config)


@pytest.mark.parametrize(
    ("asked", "set_", "served"),
    [
        (None, None, "smollm2"),
        (None, "/models/Qwen3-4B", Path("/models/Qwen3-4B")),
        ("tiny", "/models/Qwen3-4B", "tiny"),
        ("smollm2", "/models/Qwen3-4B", "smollm2"),
        ("./tiny", None, Path("./tiny")),
    ],
)
def test_the_command_line_names_the_model_else_the_settings_do_else_it_is_smollm2(
    asked: str | None, set_: str | None, served: Path | Own
) -> None:
    assert which_model(asked, EngineSettings(model_path=set_)) == served


def test_engines_of_others_that_serve_nobody_says_what_are_refused() -> None:
    elsewhere = EngineSettings(urls=("http://gpu:30010",))
    with pytest.raises(ConfigError, match=r"engine.urls names http://gpu:30010, and engine.model_path is not set"):
        which_model(None, elsewhere)
    assert which_model("smollm2", elsewhere) == "smollm2"


@pytest.mark.parametrize("name", ["smollm2", "tiny"])
def test_what_is_said_to_one_of_our_own_models_never_trains_another(unsaid: Settings, name: Own) -> None:
    own = suited(unsaid, name, HASH)
    assert own.policy.id == f"{name}-01234567"
    assert own.checkpoints_dir != unsaid.checkpoints_dir
    assert own.policy.served_model == unsaid.policy.served_model


def test_smollm2_gets_an_adapter_and_answers_that_a_laptop_can_bear(unsaid: Settings) -> None:
    own = suited(unsaid, "smollm2", HASH)
    assert (own.gateway.default_temperature, own.gateway.default_max_tokens) == (0.6, 256)
    assert (own.training.lora_rank, own.training.cadence, own.training.epochs) == (16, "correction", 4)
    assert own.training.learning_rate > TrainingSettings(lora_rank=16).learning_rate
    assert own.training.micro_batch_tokens == 1024


def test_the_tiny_policy_is_served_as_the_demo_trains_it(unsaid: Settings) -> None:
    own = suited(unsaid, "tiny", HASH)
    assert own.policy.enable_thinking is False, "it was built without"
    assert own.training == TrainingSettings(learning_rate=LEARNING_RATE)
    assert own.gateway == unsaid.gateway


EVERYTHING = """
[policy]
id = "mine"
enable_thinking = true
[gateway]
default_temperature = 1.0
default_max_tokens = 1000
[training]
lora_rank = 8
learning_rate = 1e-5
cadence = "batch"
micro_batch_tokens = 16384
"""


@pytest.mark.parametrize("name", ["smollm2", "tiny"])
def test_what_is_set_stays_also_where_it_is_the_default(tmp_path: Path, name: Own) -> None:
    settings = said(tmp_path, EVERYTHING)
    assert suited(settings, name, HASH) == settings


@pytest.mark.parametrize(
    "text",
    [
        '[judge]\nurl = "http://127.0.0.1:1/v1"\n',
        "[training]\nbatch_samples = 4\n",
        '[training]\nmethod = "binary"\n',
        '[training]\nteacher = "http://127.0.0.1:1"\n',
        '[training]\nhint_choice = "fall"\n',
    ],
)
def test_steps_are_taken_as_ever_where_a_judge_or_a_setting_says_from_what(tmp_path: Path, text: str) -> None:
    assert suited(said(tmp_path, text), "smollm2", HASH).training.cadence == "batch"
