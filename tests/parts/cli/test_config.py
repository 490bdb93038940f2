"""`clawstream config` explains each setting."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from clawstream.config import Section, Settings, TrainingSettings, load
from clawstream.errors import ConfigError
from tests.parts.cli.test_cli import run


def every_setting() -> Iterator[tuple[str, FieldInfo]]:
    """Each setting by its name in the file, sections left out."""
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            assert section.__doc__, f"[{name}] has no words"
            yield from ((f"{name}.{key}", inner) for key, inner in section.model_fields.items())
        else:
            yield name, field


# 79, and twelve that nothing else says: how much thinking counts that no judge saw (w_thinking), the original's losses
# in one word (recipe), how many unseen answers keeping may cost (rehearsal_share), when a step is taken (cadence), who
# learns together (adapters), which of the hints that were offered is learned (hint_choice), whether a judge thinks,
# above which number a reward model means a good answer, whether the engines are SGLang's or vLLM's (dialect), and which
# service trains elsewhere: its address, its key, and what it calls the base.
MOST = 91
SETTINGS = dict(every_setting())


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_has_words_of_one_sentence(name: str) -> None:
    words = SETTINGS[name].description
    assert words, f"{name} has no words: give its Field a description"
    assert ". " not in f"{words} ", f"{name} takes more than one sentence: {words}"


def test_there_are_no_more_settings_than_somebody_reads() -> None:
    assert len(SETTINGS) <= MOST, "derive it, or name a constant in the module that uses it"


def test_every_setting_is_printed_with_its_words() -> None:
    printed = run("config").stdout.splitlines()
    assert {field.description for field in SETTINGS.values()} <= {line.rpartition(" # ")[2] for line in printed}


def test_a_recipe_says_what_is_not_set_beside_it() -> None:
    theirs, ours = TrainingSettings(recipe="openclaw-rl"), TrainingSettings()
    assert (theirs.kl, theirs.w_topk, theirs.as_published) == (0.0, 0.0, True)
    assert (ours.kl, ours.w_topk, ours.as_published) == (0.02, None, False)
    assert TrainingSettings(recipe="openclaw-rl", kl=0.01).kl == 0.01
    assert TrainingSettings(**theirs.model_dump()) == theirs


@pytest.mark.parametrize(
    ("said", "rate"),
    [
        ({}, 1e-5),
        ({"lora_rank": 8}, 1e-4),
        ({"lora_rank": 8, "learning_rate": 1e-5}, 1e-5),
        ({"learning_rate": 0.0, "lora_rank": 8}, 0.0),
    ],
)
def test_an_adapter_s_learning_rate_is_its_own_unless_one_is_set(said: dict[str, float], rate: float) -> None:
    training = Settings(environment=False, training=said).training
    assert training.learning_rate == rate
    assert ("learning_rate" in training.model_fields_set) == ("learning_rate" in said)


@pytest.mark.parametrize("adapters", ["by_key", "metadata.agent"])
def test_adapters_of_keys_are_refused_where_versions_are_fetched(tmp_path: Path, adapters: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[policy]\nadapters = "{adapters}"\n[weights]\nurl = "http://trainer:1"\n')
    found = re.escape(f"policy.adapters is {adapters!r}")
    with pytest.raises(ConfigError, match=rf"{found}.*not fetched.*policy\.adapters = 'shared'"):
        load(path)


def test_an_adapter_of_another_kind_is_refused_with_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[policy]\nadapters = "by_agent"\n')
    with pytest.raises(ConfigError, match=r"policy\.adapters: .*shared\|by_key\|metadata.*found 'by_agent'"):
        load(path)


def test_adapters_of_keys_are_not_fetched_and_the_file_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "clawstream.toml"
    path.write_text('[policy]\nadapters = "by_key"\n[weights]\nurl = "http://trainer:9000"\n')
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: Value error, weights\.url is set"):
        load(path)
