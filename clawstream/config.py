"""Settings: one TOML, read once by the command line, overridden by CLAWSTREAM_* variables.

Nothing else reads the environment.
An unknown key is an error. Every stage gets its own section and nothing else.
`CLAWSTREAM_GATEWAY__PORT=8080` overrides `port` under `[gateway]`; CLAWSTREAM_KAFKA and CLAWSTREAM_POSTGRES are
short for the addresses of the two servers. All sections stand in one file, as this is where people look a key up.
"""

import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from clawstream.errors import ConfigError

PREFIX = "CLAWSTREAM_"
EXAMPLE_KEY = "change-me"
_USERINFO = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*://)?[^/?#]*@")
IDLE: Mapping[str, tuple[tuple[str, ...], str]] = {  # by method
    "topk": (
        ("loss", "w_binary"),
        "how advantages act, and method = 'topk' has none: it brings whole distributions together",
    ),
    "stepwise": (
        ("w_opd", "teacher"),
        "how hints act, and method = 'stepwise' holds a group's attempts against each other",
    ),
    "binary": (("w_opd", "teacher"), "how hints act, and method = 'binary' learns from rewards alone"),
    "opd": (("w_binary",), "how rewards act, and method = 'opd' learns from hints alone"),
}
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _refuse_userinfo(name: str, url: str, key: str) -> None:
    """Addresses are shown in pages, logs and events."""
    if _USERINFO.match(url):
        raise ValueError(
            f"{name} holds a user name or a password, and addresses are shown in logs, pages and events: take it out "
            f"of the address and set {key}"
        )


class Section(BaseModel):
    """A part of the settings: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)


class KafkaSettings(Section):
    """The broker."""

    bootstrap: str | None = Field(None, description="host:port[,host:port]; none: a broker of our own is started")
    prefix: str = Field("", description="put before every topic and group name", pattern=r"^[A-Za-z0-9._-]*$")
    instance: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="names this process among those of its stage; after a restart it has its partitions back at once",
    )
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="how the broker is reached; a broker of our own says so itself"
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = Field(
        None, description="how the account proves itself, with the SASL protocols"
    )
    sasl_username: str | None = Field(None, description="the account at the broker, with the SASL protocols")
    sasl_password: SecretStr | None = Field(None, description="of that account")
    ca_file: Path | None = Field(
        None, description="PEM of who signed the broker's certificate; none: the system's authorities"
    )


class PostgresSettings(Section):
    """The database."""

    url: SecretStr | None = Field(None, description="an SQLAlchemy URL; none: a database of our own is started")


class EngineSettings(Section):
    """The inference engine, and the policy that it serves."""

    urls: tuple[str, ...] = Field((), description="SGLang servers; none: the embedded CPU engine is started")
    api_key: SecretStr | None = Field(None, description="what the engines were started with as --api-key, if anything")
    model_path: Path | None = Field(None, description="the Hugging Face folder of the base policy")
    port: int = Field(30010, ge=0, le=65535, description="of the embedded engine; 0: any free one")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the engines in force: `urls`, or the embedded engine's."""
        return self.urls or (f"http://127.0.0.1:{self.port}",)

    @property
    def base_policy(self) -> Path:
        """The folder of the base policy; raises ConfigError where none is set."""
        if self.model_path is None:
            raise ConfigError("engine.model_path is not set: name the Hugging Face folder of the policy")
        return self.model_path

    @model_validator(mode="after")
    def _addresses_are_no_secrets(self) -> "EngineSettings":
        for number, url in enumerate(self.urls):
            _refuse_userinfo(f"engine.urls[{number}]", url, "engine.api_key")
        return self


class PolicySettings(Section):
    """What learns."""

    id: str = Field("policy", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", description="names the policy on the log")
    served_model: str = Field("policy", description="the model name that clients ask for")
    renderer: str = Field("auto", description="the chat template's family, as the renderers package names it")
    enable_thinking: bool | None = Field(None, description="for families that can think; none: the template's default")
    trust_tokenizer_code: bool = Field(False, description="run the model folder's Python tokenizer, as Kimi K2 has one")

    @property
    def is_named(self) -> bool:
        """Whether the policy has an id other than the default."""
        return bool(self.id != type(self).model_fields["id"].default)


class GatewaySettings(Section):
    """The HTTP gateway that clients talk to."""

    host: str = Field("127.0.0.1", description="the address that it listens on; any but this machine's own wants a key")
    port: int = Field(30000, ge=0, le=65535, description="that it listens on; 0: any free one")
    api_key: SecretStr | None = Field(None, description="a key named default; without any only this machine is served")
    keys_file: Path | None = Field(None, description="of `clawstream keys`; none: keys.json in the data folder")
    max_concurrent_per_key: int | None = Field(None, ge=1, description="requests in flight; none: no limit")
    requests_per_minute_per_key: int | None = Field(None, ge=1, description="none: no limit")
    share_prefix_cache: bool = Field(
        False, description="between keys: less to prefill, and a key can find out what others asked"
    )
    max_in_flight: int = Field(1024, ge=1, description="requests at once; one more is a 503 with Retry-After")
    default_max_tokens: int | None = Field(
        None, ge=1, description="where the client names no limit; unset: what the context leaves"
    )
    default_temperature: float = Field(0.7, ge=0, le=2, description="where the client names none")
    spool_bytes: int = Field(2**30, ge=2**16, description="may wait on disk for Kafka; beyond them requests are a 503")

    @model_validator(mode="after")
    def _a_key_guards_other_addresses(self) -> "GatewaySettings":
        if self.host not in LOOPBACK and self.api_key is None and self.keys_file is None:
            raise ValueError(
                f"host {self.host} can be reached from outside: set gateway.api_key, or gateway.keys_file to a file "
                "with a key in it (clawstream keys add NAME), or listen on 127.0.0.1"
            )
        if self.api_key is not None and self.api_key.get_secret_value() == EXAMPLE_KEY:
            raise ValueError(
                f"api_key is {EXAMPLE_KEY!r}, as in the examples, which everybody knows: set one of your own "
                "(gateway.api_key, CLAWSTREAM_GATEWAY__API_KEY, or SGLANG_API_KEY under Compose and launch)"
            )
        return self


class JudgeSettings(Section):
    """The judges: any OpenAI-compatible endpoint."""

    url: str | None = Field(None, description="base URL ending in /v1; none: nothing is judged")
    model: str = Field("judge", description="the name by which the endpoint knows it, on the log too")
    api_key: SecretStr | None = Field(None, description="of the endpoint, if it asks for one")
    votes: int = Field(3, ge=1, le=15, description="per question and turn")
    hint_quorum: int | None = Field(
        None, ge=1, description="votes that must offer a hint, or there is none; 1: any; none: a majority of votes"
    )
    max_tokens: int = Field(1024, ge=16, description="of a vote, its reasoning included")

    @model_validator(mode="after")
    def _its_address_is_no_secret(self) -> "JudgeSettings":
        _refuse_userinfo("judge.url", self.url or "", "judge.api_key")
        return self

    @property
    def needed(self) -> int:
        """Readable votes that a verdict needs: a majority."""
        return self.votes // 2 + 1

    @property
    def needed_for_a_hint(self) -> int:
        """The hints' quorum in force."""
        return self.needed if self.hint_quorum is None else self.hint_quorum


class TeacherSettings(Section):
    """An engine that is the teacher, in place of the trainer: SGLang's dialect, and the policy's own tokenizer."""

    url: str | None = Field(None, description='of the engine that training.teacher = "engine" has weigh hints')
    model: str = Field("teacher", description="names it on the log, with its address")
    api_key: SecretStr | None = Field(None, description="of the engine, if it asks for one")

    @model_validator(mode="after")
    def _its_address_is_no_secret(self) -> "TeacherSettings":
        _refuse_userinfo("teacher.url", self.url or "", "teacher.api_key")
        return self


class SamplesSettings(Section):
    """What becomes a sample."""

    off_distribution: Literal["refuse", "hint_only", "gateway_override"] = Field(
        "refuse",
        description="answers sampled with temperature 0, top_p, top_k, penalties or a grammar, so not by the policy's "
        "own probabilities: no sample, one without its reward (with method = topk alone: others weigh hints by "
        "log-probs too), or the gateway samples main turns from the whole distribution whatever the client asks, and "
        "refuses grammars",
    )
    interrupted: bool = Field(
        False,
        description="train on answers that people stopped, as far as they had got them; they are judged in any case",
    )


class RewardsSettings(Section):
    """How much each source counts in a sample's reward: the weighted sum of those that said something, -1 to 1."""

    judge: float = Field(1.0, ge=0, description="0: it is recorded alone, as with all four")
    person: float = Field(1.0, ge=0, description="of thumbs and scores that people give")
    environment: float = Field(1.0, ge=0, description="of outcomes that environments report")
    heuristic: float = Field(1.0, ge=0, description="of heuristic_function's scores")
    heuristic_function: str | None = Field(
        None,
        description="an entry point of the group clawstream.heuristics that scores finished turns; none: none does",
    )

    @property
    def weights(self) -> dict[str, float]:
        """By source."""
        return self.model_dump(include={"judge", "person", "environment", "heuristic"})


class TrainingSettings(Section):
    """Micro-batches and losses: docs/training.md."""

    batch_samples: int = Field(16, ge=1, description="a step is taken on so many, or on fewer after max_wait_s")
    max_wait_s: float = Field(3600.0, gt=0, description="since the oldest waiting sample; then a smaller batch fires")
    group_wait_s: float = Field(
        1800.0,
        gt=600,  # after which judges say nothing new of an attempt
        le=7 * 86_400,  # for which an attempt is known
        description="after a group's first attempt ended, for the others to end and for outcomes",
    )
    max_versions_behind: int | None = Field(None, ge=0, description="older samples are dropped; none: never")
    late: Literal["record", "refresh"] = Field(
        "record",
        description="what becomes of a sample whose turn was trained on before it came: it is recorded alone; or, with "
        "a hint, the policy answers its prompt again, unseen, and that answer is trained on",
    )
    answers_per_hint: int = Field(
        1, ge=1, le=64, description="the turn's own among them; the policy gives the others unseen"
    )
    max_updates: int | None = Field(None, ge=1, description="stop after this many; none: never")
    method: Literal["combined", "binary", "opd", "topk", "stepwise"] = Field(
        "combined",
        description="what is learned from: verdicts and hints, verdicts, hints (two ways), or steps of agents",
    )
    loss: Literal["ppo", "importance_sampling", "cispo"] = Field(
        "ppo", description="how advantages act: clipped, unclipped, or with the ratio alone clipped"
    )
    w_binary: float = Field(1.0, ge=0, description="weight of the reward in an advantage; 0: rewards teach nothing")
    w_opd: float = Field(1.0, ge=0, description="weight of the hint in an advantage; 0: hints teach nothing")
    w_topk: float | None = Field(
        None,
        ge=0,
        description="combined: of the divergence from the teacher's 50 likeliest tokens, always forward; none: 1, or "
        "0 where there is no such divergence",
    )
    kl: float = Field(
        0.02, ge=0, description="weight of the divergence from the base that holds the policy back; 0: none"
    )
    epochs: int = Field(1, ge=1, description="passes over each batch")
    teacher: Literal["reference", "ema", "current", "engine"] = Field(
        "reference",
        description="who weighs hints: the base, a moving average of the policy, the policy itself, or teacher.url",
    )
    learning_rate: float = Field(1e-5, ge=0, description="0: every version is the base, a control")
    gate: bool = Field(True, description="a step that does harm is not published; its samples are used up by it")
    lora_rank: int | None = Field(None, ge=1, description="none: all weights are trained")
    trainer: Literal["torch", "fsdp", "megatron"] = Field("torch", description="torch is one process")
    processes: int = Field(1, ge=1, description="of the trainer, on this machine; each has a GPU of its own, if any")
    tensor_parallel: int = Field(
        1, ge=1, description="megatron: processes that share each matrix, and the tokens in between"
    )
    pipeline_parallel: int = Field(1, ge=1, description="megatron: processes that have the layers one after the other")
    micro_batch_tokens: int = Field(16_384, ge=64, description="in one pass; what answers begin with alike counts once")
    gradient_checkpointing: bool = Field(False, description="less memory, more time: layers are computed twice")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="of matrix products; weights, sums of their gradients, optimizer and log-softmax are float32",
    )
    keep_checkpoints: int = Field(5, ge=1, description="newest versions that a rollback reaches, beside pinned ones")
    seed: int = Field(0, description="of an adapter's first weights, and of what the gate has a policy write")
    save_dir: Path | None = Field(None, description="where versions are kept; none: in the data folder")

    @model_validator(mode="after")
    def _known_together(self) -> "TrainingSettings":
        names, why = IDLE.get(self.method, ((), ""))
        if idle := [name for name in names if self._is_said(name)]:
            raise ValueError(f"{', '.join(idle)}: these say {why}. Leave them out, or take another method")
        if not any(self.weights):
            raise ValueError(
                f"w_binary = {self.w_binary:g}, w_opd = {self.w_opd:g} with method = {self.method!r}: nothing that it "
                "learns from has a weight. Give it one above 0; learning_rate = 0 is how a policy stays as it is"
            )
        return self

    @model_validator(mode="after")
    def _a_whole_distribution_where_there_is_one(self) -> "TrainingSettings":
        if self.w_topk and not self._can_diverge:
            raise ValueError(
                f"w_topk = {self.w_topk:g} weighs the teacher's whole distribution beside the gaps of its tokens, and "
                f"method = {self.method!r}, teacher = {self.teacher!r}, w_opd = {self.w_opd:g} do not "
                "have both: leave it out, or take method = 'combined', another teacher than 'engine' and w_opd above 0"
            )
        return self

    @model_validator(mode="after")
    def _a_teacher_for_hints(self) -> "TrainingSettings":
        if self.by_engine and self.method == "topk":
            raise ValueError(
                "teacher = 'engine' gives the log-probs of the tokens sampled, and method = 'topk' needs those of the "
                "teacher's likeliest: take 'opd' or 'combined', or another teacher"
            )
        if self.by_engine and self.w_opd == 0:
            raise ValueError(
                "teacher = 'engine' weighs hints, and with w_opd = 0 they count nothing: leave it out, or take w_opd "
                "above 0"
            )
        return self

    @model_validator(mode="after")
    def _answers_anew_for_hints(self) -> "TrainingSettings":
        if self.refreshes and self.weights[1] == 0:
            raise ValueError(
                f"late is {self.late!r} and answers_per_hint is {self.answers_per_hint}: an answer given anew teaches "
                f"by its hint alone, and hints have no weight under method = {self.method!r} with w_opd = "
                f"{self.w_opd:g}. Say late = 'record' and answers_per_hint = 1, or take another method"
            )
        return self

    @property
    def by_engine(self) -> bool:
        """Whether the teacher is an engine, at teacher.url."""
        return self.teacher == "engine"

    @property
    def refreshes(self) -> bool:
        """Whether prompts of the past are answered again."""
        return self.late == "refresh" or self.answers_per_hint > 1

    def _is_said(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @model_validator(mode="after")
    def _cut_as_the_trainer_can(self) -> "TrainingSettings":
        cut = self.tensor_parallel * self.pipeline_parallel
        if self.trainer == "torch" and self.processes > 1:
            raise ValueError(f"trainer = 'torch' is one process, not {self.processes}. Take 'fsdp' or 'megatron'")
        if self.trainer != "megatron" and cut > 1:
            raise ValueError(
                f"trainer = {self.trainer!r} cuts no matrices or layers: tensor_parallel and pipeline_parallel are "
                "megatron's. Leave them out, or take 'megatron'"
            )
        if self.processes % cut:
            raise ValueError(
                f"processes = {self.processes} is no multiple of tensor_parallel * pipeline_parallel = {cut}: each "
                "copy of the model needs so many"
            )
        return self

    @property
    def weights(self) -> tuple[float, float]:
        """(binary, opd), as the method says."""
        binary = 0.0 if self.method in ("opd", "topk") else self.w_binary
        opd = 0.0 if self.method in ("binary", "stepwise") else self.w_opd
        return binary, opd

    @property
    def divergence_weight(self) -> float:
        """How much the distance from the teacher's whole distribution counts."""
        if self.method == "topk":
            return self.w_opd
        return float(self._can_diverge) if self.w_topk is None else self.w_topk

    @property
    def resolved(self) -> "TrainingSettings":
        """The same settings with every derived value written out, so that later releases read them alike."""
        return self if self.w_topk is not None else self.model_copy(update={"w_topk": float(self._can_diverge)})

    @property
    def _can_diverge(self) -> bool:
        """Whether the teacher's whole distribution can count beside the gaps of its tokens."""
        return self.method == "combined" and not self.by_engine and self.w_opd > 0

    @property
    def asks_likeliest(self) -> bool:
        """Whether the teacher is asked for its likeliest tokens."""
        return self.method == "topk" or self.divergence_weight > 0


class WeightsSettings(Section):
    """Versions on their way from the trainer to engines on another machine."""

    offer: str | None = Field(
        None,
        pattern=r"^\S+:\d{1,5}$",
        description="HOST:PORT at which the trainer offers its versions' files, any host but this machine's own with "
        "weights.api_key; none: engines see its disk",
    )
    url: str | None = Field(
        None,
        description="of the trainer that offers them, and `up` starts none; none: versions lie where they were written",
    )
    api_key: SecretStr | None = Field(None, description="of the offer, the same on both machines")

    @model_validator(mode="after")
    def _a_key_guards_other_addresses(self) -> "WeightsSettings":
        _refuse_userinfo("weights.url", self.url or "", "weights.api_key")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"weights.url is {self.url!r}, expected http://HOST:PORT")
        if self.url is not None and self.offer is not None:
            raise ValueError(
                "weights.url says that the trainer is elsewhere, and weights.offer that it is here: name one"
            )
        if self.api_key is not None and self.api_key.get_secret_value() == EXAMPLE_KEY:
            raise ValueError(
                f"weights.api_key is {EXAMPLE_KEY!r}, as in the examples, which everybody knows: set another"
            )
        if self.offer and self.offer.rpartition(":")[0].strip("[]") not in LOOPBACK and self.api_key is None:
            raise ValueError(
                f"weights.offer {self.offer} can be reached from outside: set weights.api_key on both machines, or "
                "listen on 127.0.0.1 and bring the port over with ssh"
            )
        return self


class MonitorSettings(Section):
    """The live windows; they are for this machine, at 127.0.0.1 and behind no key."""

    port: int = Field(30066, ge=0, le=65535, description="that it listens on; 0: any free one")


class _Environment(EnvSettingsSource):
    """The CLAWSTREAM_* variables, with the two servers' addresses by their short names."""

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
        description="where the log, the rows, keys and versions of this machine lie",
    )
    cache_dir: Path = Field(
        default_factory=lambda: Path(platformdirs.user_cache_dir("clawstream")),
        description="where what can be fetched or made again lies",
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
    weights: WeightsSettings = WeightsSettings()
    monitor: MonitorSettings = MonitorSettings()

    @model_validator(mode="after")
    def _hints_alone_count_where_whole_distributions_are_held_against_each_other(self) -> "Settings":
        method = self.training.method
        if method == "topk" or self.samples.off_distribution != "hint_only":
            return self
        if self.training.weights[1] == 0:
            why = f"hints have no weight under training.method = {method!r} with w_opd = {self.training.w_opd:g}"
        else:
            why = (
                f"training.method = {method!r} weighs them, whatever its w_topk, by the log-probs of tokens that were "
                "not drawn by those"
            )
        raise ValueError(
            f"samples.off_distribution = 'hint_only' lets hints count where rewards don't, and {why}: say 'refuse' or "
            "'gateway_override', or take training.method = 'topk'"
        )

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

    @model_validator(mode="after")
    def _an_engine_is_named_where_it_is_the_teacher(self) -> "Settings":
        if (self.teacher.url is not None) != self.training.by_engine:
            found = "not set" if self.teacher.url is None else "set"
            raise ValueError(
                f"teacher.url is {found} and training.teacher is {self.training.teacher!r}: an engine is asked for a "
                "teacher's scores where it is 'engine' and teacher.url says where. Set both, or neither"
            )
        return self

    @property
    def keys_file(self) -> Path:
        """Where the keys of clients are kept."""
        return self.gateway.keys_file or self.data_dir / "keys.json"

    @property
    def checkpoints_dir(self) -> Path:
        """Where the versions of this policy are kept."""
        return (self.training.save_dir or self.data_dir / "policies") / self.policy.id


def load(path: Path | None) -> Settings:
    """Return the settings in the file (TOML, or JSON as `dump` writes it), or the defaults, and what overrides them.

    Raises ConfigError naming the key, what was found and what is allowed.
    """
    values = {} if path is None else _read(path)
    if values.get("environment") is not False:
        _refuse_unknown_variables()
    try:
        settings = Settings(**values)
    except ValidationError as error:
        problems = "; ".join(f"{_origin(item['loc'], path, values)}{_problem(dict(item))}" for item in error.errors())
        raise ConfigError(f"{problems}. Nothing was started.") from error
    return settings


def _origin(location: tuple[int | str, ...], path: Path | None, values: Mapping[str, Any]) -> str:
    """Return where the value was set: by a variable, which overrides the file, or in the file."""
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
    """Refuse CLAWSTREAM_* variables that override nothing, as they are typing errors."""
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
    where = f"{key}: " if key else ""  # no key: the error is about several
    return f"{where}{item.get('msg')}" + ("" if hidden else f" (found {found!r})")


def dump(settings: Settings) -> str:
    """Return the settings as JSON that `load` reads, passwords in clear; no variable overrides that JSON."""
    return json.dumps(_revealed(settings.model_dump() | {"environment": False}))


def inherited_environment() -> dict[str, str]:
    """Return the environment for a child whose settings stand in a file."""
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
    """Let torch's processes find each other on the loopback alone, whatever the host's name resolves to."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
