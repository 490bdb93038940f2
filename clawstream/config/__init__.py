"""Settings: one TOML file, read once by the command line; CLAWSTREAM_* variables override it.

Nothing else reads those variables. An unknown key is an error. `CLAWSTREAM_GATEWAY__PORT=8080` overrides `port` under
`[gateway]`; CLAWSTREAM_KAFKA and CLAWSTREAM_POSTGRES are short for the addresses of the two servers.
"""

import json
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs
from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from clawstream.config.sections import (
    EXAMPLE_KEY,
    LOOPBACK,
    EngineSettings,
    GatewaySettings,
    JudgeSettings,
    KafkaSettings,
    MonitorSettings,
    PolicySettings,
    PostgresSettings,
    Section,
    TeacherSettings,
    TinkerSettings,
    WeightsSettings,
)
from clawstream.config.training import IDLE, RewardsSettings, SamplesSettings, TrainingSettings
from clawstream.errors import ConfigError

PREFIX = "CLAWSTREAM_"
KEYS_RANK = 16  # of adapters beside the shared one, where training.lora_rank is not set


class _Environment(EnvSettingsSource):
    """The CLAWSTREAM_* variables, where CLAWSTREAM_KAFKA and CLAWSTREAM_POSTGRES are the servers' addresses."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        short = {"kafka": "bootstrap", "postgres": "url"}.get(field_name)
        if short is not None and not value.startswith("{"):
            return {short: value}
        return super().decode_complex_value(field_name, field, value)


class Settings(BaseSettings):
    """Everything, as one frozen value."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        env_prefix=PREFIX,
        env_nested_delimiter="__",
    )

    environment: bool = Field(True, description="whether CLAWSTREAM_* variables override what stands here")
    data_dir: Path = Field(
        default_factory=lambda: Path(platformdirs.user_data_dir("clawstream")),
        description="folder of this machine's log, database, keys and versions",
    )
    cache_dir: Path = Field(
        default_factory=lambda: Path(platformdirs.user_cache_dir("clawstream")),
        description="folder of files that can be fetched or made again",
    )
    kafka: KafkaSettings = KafkaSettings()
    postgres: PostgresSettings = PostgresSettings()
    engine: EngineSettings = EngineSettings()
    policy: PolicySettings = PolicySettings()
    gateway: GatewaySettings = GatewaySettings()
    judge: JudgeSettings = JudgeSettings()
    teacher: TeacherSettings = TeacherSettings()
    samples: SamplesSettings = SamplesSettings()
    rewards: RewardsSettings = RewardsSettings()
    training: TrainingSettings = TrainingSettings()
    tinker: TinkerSettings = TinkerSettings()
    weights: WeightsSettings = WeightsSettings()
    monitor: MonitorSettings = MonitorSettings()

    @model_validator(mode="before")
    @classmethod
    def _adapters_have_a_rank(cls, said: Any) -> Any:
        policy, training = said.get("policy"), said.get("training", {})
        if isinstance(policy, dict) and policy.get("adapters", "shared") != "shared" and isinstance(training, dict):
            return said | {"training": training | {"lora_rank": training.get("lora_rank") or KEYS_RANK}}
        return said

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003  # pydantic's own; ours stands in for it
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Put the environment before the file (which `load` passes as arguments), unless the file shuts it out."""
        if init_settings().get("environment") is False:
            return (init_settings,)
        return _Environment(settings_cls), init_settings

    def of_policy(self, policy_id: str) -> "Settings":
        """Return the settings of another policy on the same base; its versions have a folder of their own."""
        return self.model_copy(update={"policy": self.policy.model_copy(update={"id": policy_id})})

    def where_unset(self, chosen: Mapping[str, Mapping[str, Any]]) -> "Settings":
        """Return the settings with these values, by section and key, wherever none is set; others may follow from them.

        The values have to go with those that are set.
        """
        sections = {name: getattr(self, name) for name in chosen}
        said = {name: {key: getattr(one, key) for key in one.model_fields_set} for name, one in sections.items()}
        updated = {name: type(one)(**(dict(chosen[name]) | said[name])) for name, one in sections.items()}
        return self.model_copy(update=updated)

    @model_validator(mode="after")
    def _adapters_of_keys_lie_on_this_machine(self) -> "Settings":
        if self.policy.by_key and self.weights.url is not None:
            raise ValueError(
                f"weights.url is set and policy.adapters is {self.policy.adapters!r}: adapters beside the shared one "
                "are not fetched from another machine. Train on this machine (take weights.url out), or say "
                "policy.adapters = 'shared'"
            )
        return self

    @model_validator(mode="after")
    def _groups_wait_for_their_judge(self) -> "Settings":
        wait_s, deadline_s = self.training.group_wait_s, self.judge.deadline_s
        if self.training.method == "stepwise" and self.judge.url is not None and wait_s <= deadline_s:
            raise ValueError(
                f"training.group_wait_s is {wait_s:g} s, and a judge may take {deadline_s:g} s for a vote "
                f"(judge.max_tokens = {self.judge.max_tokens}): a group would be settled before it has spoken. Wait "
                "longer, or lower judge.max_tokens"
            )
        return self

    @property
    def keys_file(self) -> Path:
        """Where the keys of clients are kept."""
        return self.gateway.keys_file or self.data_dir / "keys.json"

    @property
    def pictures_dir(self) -> Path:
        """Where the pictures of conversations are kept."""
        return self.data_dir / "pictures"

    @property
    def checkpoints_dir(self) -> Path:
        """Where the versions of this policy are kept."""
        return (self.training.save_dir or self.data_dir / "policies") / self.policy.id


def load(path: Path | None) -> Settings:
    """Return the settings: from variables, else from the file (TOML, or JSON as `dump` writes it), else the defaults.

    Raises ConfigError naming the key, what was found and what is allowed.
    """
    values = {} if path is None else _read(path)
    if values.get("environment") is not False:
        _refuse_unknown_variables()
    try:
        return Settings(**values)
    except ValidationError as error:
        found = [item for item in error.errors() if item["type"] != "default_factory_not_called"]  # follows from others
        problems = "; ".join(f"{_origin(item['loc'], path, values)}{_problem(dict(item))}" for item in found)
        raise ConfigError(f"{problems}. Nothing was started.") from error


def _origin(location: tuple[int | str, ...], path: Path | None, values: Mapping[str, Any]) -> str:
    """Return what set the value: a variable, which overrides the file, or the file."""
    names = [PREFIX + "__".join(map(str, location[:depth])).upper() for depth in (1, 2)] if location else []
    if values.get("environment") is not False:
        for name in os.environ:
            if name.upper() in names:
                return f"{name}: "
    return f"{path}: " if path else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; name an existing one with --config, or leave it out") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    assert isinstance(found, dict)
    return found


def _refuse_unknown_variables() -> None:
    """Raise ConfigError for CLAWSTREAM_* variables that name no setting: they are misspelt."""
    fields = Settings.model_fields
    known = {f"{PREFIX}{name}".upper() for name in fields}
    for name, field in fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            known |= {f"{PREFIX}{name}__{key}".upper() for key in section.model_fields}
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name.upper() not in known)
    if unknown:
        raise ConfigError(
            f"unknown variable {', '.join(unknown)}: it overrides nothing. Unset it, or see `clawstream config` for "
            "the keys there are (CLAWSTREAM_GATEWAY__PORT is `port` under `[gateway]`). Nothing was started."
        )


def _problem(item: dict[str, object]) -> str:
    location = item.get("loc", ())
    key = ".".join(map(str, location)) if isinstance(location, tuple) else str(location)
    if item.get("type") == "extra_forbidden":
        return f"unknown key {key}: remove it, or see `clawstream config` for the keys there are"
    found = item.get("input")
    hidden = isinstance(found, dict) or "@" in repr(found) or key.endswith(("api_key", "password"))
    where = f"{key}: " if key else ""  # no key: the error is about several sections
    return f"{where}{item.get('msg')}" + ("" if hidden else f" (found {found!r})")


def dump(settings: Settings) -> str:
    """Return the settings as JSON that `load` reads, passwords in clear; no variable overrides that JSON."""
    return json.dumps(_revealed(settings.model_dump() | {"environment": False}))


def inherited_environment() -> dict[str, str]:
    """Return the environment for a child process that reads its settings from a file: no CLAWSTREAM_* variable."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


def _revealed(value: object) -> object:
    if isinstance(value, dict):
        return {key: _revealed(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_revealed(item) for item in value]
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value) if isinstance(value, Path) else value


def quiet_transformers() -> None:
    """Let transformers, once imported, log errors only; its advice is for people who write models."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def stay_on_this_machine() -> None:
    """Let torch's processes find each other on the loopback interface alone, whatever the host's name resolves to."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")


def share_cores() -> None:
    """Let torch's threads, once it is imported, sleep while they wait for each other, so that other processes compute.

    Where engine and trainer have as many threads as there are cores, each would else spin while the other computes.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
