"""The sections of the settings, except those in training.py: what each key is, and which combinations are refused."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from clawstream.errors import ConfigError

EXAMPLE_KEY = "change-me"
_USERINFO = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*://)?[^/?#]*@")
_METADATA = "metadata."
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _open_address(url: str) -> str:
    if _USERINFO.match(url):
        raise ValueError(
            "it holds a user name or a password, and addresses are shown in logs, pages and events: take it out and "
            "set that server's api_key"
        )
    return url


def _own_key(key: SecretStr) -> SecretStr:
    if key.get_secret_value() == EXAMPLE_KEY:
        raise ValueError(
            f"it is {EXAMPLE_KEY!r}, as in the examples, which everybody knows: set one of your own (in a variable: "
            "CLAWSTREAM_GATEWAY__API_KEY, or SGLANG_API_KEY under Compose and launch)"
        )
    return key


Address = Annotated[str, AfterValidator(_open_address)]
Key = Annotated[SecretStr, AfterValidator(_own_key)]


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
        description="names this process among those of its stage; once restarted it gets its partitions back at once",
    )
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="how the broker is reached; set by itself for a broker of our own"
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = Field(
        None, description="how the account proves itself, with the SASL protocols"
    )
    sasl_username: str | None = Field(None, description="the account at the broker, with the SASL protocols")
    sasl_password: SecretStr | None = Field(None, description="of the account sasl_username")
    ca_file: Path | None = Field(
        None, description="PEM file of the authority that signed the broker's certificate; none: the system's"
    )

    @property
    def address(self) -> str:
        """The broker's address; raises ConfigError where none is set."""
        if self.bootstrap is None:
            raise ConfigError("kafka.bootstrap is not set: name a broker, or run `clawstream up`, which starts one")
        return self.bootstrap

    @property
    def password(self) -> str | None:
        """The account's password, in the clear."""
        return None if self.sasl_password is None else self.sasl_password.get_secret_value()


class PostgresSettings(Section):
    """The database."""

    url: SecretStr | None = Field(None, description="an SQLAlchemy URL; none: a database of our own is started")


class EngineSettings(Section):
    """The inference engine, and the policy that it serves."""

    urls: tuple[Address, ...] = Field(
        (), description="SGLang or vLLM servers; none: the embedded CPU engine is started"
    )
    dialect: Literal["sglang", "vllm"] = Field(
        "sglang", description="what the servers at engine.urls are, and the one at training.teacher"
    )
    api_key: SecretStr | None = Field(None, description="the --api-key that the engines were started with, if any")
    model_path: Path | None = Field(None, description="the Hugging Face folder of the base policy")
    port: int = Field(30010, ge=0, le=65535, description="of the embedded engine; 0: any free one")

    @model_validator(mode="after")
    def _our_own_engine_speaks_as_sglang_does(self) -> "EngineSettings":
        if self.dialect == "vllm" and not self.urls:
            raise ValueError(
                "engine.dialect is vllm and engine.urls is empty: no vLLM is started for you. Start it (docs/vllm.md) "
                "and name its address in engine.urls"
            )
        return self

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


class PolicySettings(Section):
    """What learns."""

    id: str = Field("policy", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", description="names the policy on the log")
    adapters: str = Field(
        "shared",
        pattern=r"^(shared|by_key|metadata\.[A-Za-z0-9._-]{1,64})$",
        description="who learns together: shared: everybody; by_key: each API key has an adapter of its own, which is "
        "trained on what is said under that key alone; metadata.agent, for instance: so has each value of this entry "
        "of requests' metadata, under each key (training.lora_rank is 16 then, where it is not set)",
    )
    served_model: str = Field("policy", description="the model name that clients ask for")
    renderer: str = Field(
        "auto", description="the chat template's family, as the renderers package names it, or chatml"
    )
    enable_thinking: bool | None = Field(None, description="for families that can think; none: the template's default")
    trust_tokenizer_code: bool = Field(False, description="run Python code of the model folder's tokenizer (Kimi K2)")

    @property
    def by_key(self) -> bool:
        """Whether there are adapters beside the shared one: one for each API key, or for each name in metadata."""
        return self.adapters != "shared"

    @property
    def agent_entry(self) -> str | None:
        """The entry of requests' metadata that names an adapter; None: none does."""
        return self.adapters.removeprefix(_METADATA) if self.adapters.startswith(_METADATA) else None

    @property
    def is_named(self) -> bool:
        """Whether the policy has an id other than the default."""
        return bool(self.id != type(self).model_fields["id"].default)


class GatewaySettings(Section):
    """The HTTP gateway that clients talk to."""

    host: str = Field("127.0.0.1", description="the address that it listens on; any but a loopback address needs a key")
    port: int = Field(30000, ge=0, le=65535, description="that it listens on; 0: any free one")
    api_key: Key | None = Field(None, description="a key named default; without keys only this machine is served")
    keys_file: Path | None = Field(None, description="of `clawstream keys`; none: keys.json in the data folder")
    max_concurrent_per_key: int | None = Field(
        None, ge=1, description="requests in flight; none: a quarter of max_in_flight, or all of it with one key"
    )
    requests_per_minute_per_key: int | None = Field(None, ge=1, description="none: no limit")
    share_prefix_cache: bool = Field(
        False, description="also between keys: less to prefill, but a key can find out what others asked"
    )
    max_in_flight: int = Field(1024, ge=1, description="requests at once; one more is a 503 with Retry-After")
    default_max_tokens: int | None = Field(
        None, ge=1, description="where the client names no limit; none: what the context leaves"
    )
    default_temperature: float = Field(0.7, ge=0, le=2, description="where the client names none")
    spool_bytes: int = Field(
        2**30, ge=2**16, description="of exchanges that wait on disk for Kafka; from 7/8 of it on requests get a 503"
    )

    @property
    def local_url(self) -> str:
        """Its address as seen from this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @model_validator(mode="after")
    def _a_key_guards_other_addresses(self) -> "GatewaySettings":
        if self.host not in LOOPBACK and self.api_key is None and self.keys_file is None:
            raise ValueError(
                f"host {self.host} can be reached from outside: set gateway.api_key, or gateway.keys_file to a file "
                "with a key in it (clawstream keys add NAME), or listen on 127.0.0.1"
            )
        return self


_VOTE_S, _VOTE_TOKENS = 60.0, 1024  # how long so many tokens may take a judge that is asked 64 things at once


class JudgeSettings(Section):
    """The judges: any OpenAI-compatible endpoint."""

    url: Address | None = Field(None, description="base URL ending in /v1; none: nothing is judged")
    model: str = Field("judge", description="the endpoint's name for the model; the log has it too")
    api_key: SecretStr | None = Field(None, description="of the endpoint, if it asks for one")
    votes: int = Field(3, ge=1, le=15, description="per question and turn")
    hint_quorum: int | None = Field(
        None, ge=1, description="how many votes must offer a hint for one to count; none: a majority of votes"
    )
    max_tokens: int = Field(8192, ge=16, description="of a vote, its thinking included")
    thinking: bool | None = Field(
        None, description="whether the judge's chat template is to have it think (enable_thinking); none: as it has it"
    )

    reward_above: float | None = Field(
        None,
        description="the judge is a reward model, and an answer is good above this number; none: it is asked in words",
    )

    @property
    def num_votes(self) -> int:
        """Votes per question and turn; a reward model would give the same number again."""
        return self.votes if self.reward_above is None else 1

    @property
    def call_timeout_s(self) -> float:
        """How long one vote may take; after it the vote is asked for again, until `deadline_s`."""
        written = self.max_tokens if self.reward_above is None else 0
        return _VOTE_S * max(1.0, written / _VOTE_TOKENS)

    @property
    def deadline_s(self) -> float:
        """After so long a vote that did not arrive is recorded as failed; a server that restarts is back sooner."""
        return max(10 * _VOTE_S, 2 * self.call_timeout_s)

    @property
    def needed(self) -> int:
        """Readable votes that a verdict needs: a majority."""
        return self.num_votes // 2 + 1

    @property
    def needed_for_a_hint(self) -> int:
        """How many votes have to offer a hint."""
        return self.needed if self.hint_quorum is None else self.hint_quorum


class TeacherSettings(Section):
    """The engine at training.teacher, if any; it speaks engine.dialect and has the policy's tokenizer."""

    model: str = Field("teacher", description="the teacher's name on the log, beside its address")
    api_key: SecretStr | None = Field(None, description="of the engine, if it asks for one")


class TinkerSettings(Section):
    """The service that trains and samples where training.trainer = "tinker", by Thinking Machines' Tinker API."""

    url: Address | None = Field(None, pattern=r"^https?://", description="its address; none: the hosted service's")
    api_key: SecretStr | None = Field(None, description="of the service; none: TINKER_API_KEY")
    model: str | None = Field(
        None, description="the service's name for the base, as Qwen/Qwen3-8B; none: the folder engine.model_path"
    )


class WeightsSettings(Section):
    """Versions on their way from the trainer to engines on another machine."""

    offer: str | None = Field(
        None,
        pattern=r"^\S+:\d{1,5}$",
        description="HOST:PORT at which the trainer offers its versions' files; a host beyond this machine needs "
        "weights.api_key; none: engines read the trainer's disk",
    )
    url: Address | None = Field(
        None,
        pattern=r"^https?://",
        description="address at which a trainer elsewhere offers versions; `up` then starts no trainer; none: engines "
        "read the trainer's disk",
    )
    api_key: Key | None = Field(None, description="of the offer, the same on both machines")

    @model_validator(mode="after")
    def _a_key_guards_other_addresses(self) -> "WeightsSettings":
        if self.url is not None and self.offer is not None:
            raise ValueError(
                "weights.url says that the trainer is elsewhere, and weights.offer that it is here: name one"
            )
        if self.offer and self.offer.rpartition(":")[0].strip("[]") not in LOOPBACK and self.api_key is None:
            raise ValueError(
                f"weights.offer {self.offer} can be reached from outside: set weights.api_key on both machines, or "
                "listen on 127.0.0.1 and bring the port over with ssh"
            )
        return self


class MonitorSettings(Section):
    """The live windows; no key guards them, so only this machine can reach them, at 127.0.0.1."""

    port: int = Field(30066, ge=0, le=65535, description="that it listens on; 0: any free one")
