"""A Kafka broker of our own, in KRaft mode, for one machine, and who may use it.

It is ready when it lists itself as a broker that takes requests, and not before.

Clients prove that they have the password (SCRAM) and do not send it, so a stranger who listens on the port of a broker
that is down learns nothing. The controller's port is for the broker itself, by a password that changes with each start.
"""

import base64
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import SecretStr
from rich.console import Console

from clawstream.errors import PartUnavailable
from clawstream.local.servers import accounts
from clawstream.local.servers.jars import KAFKA_REMEDIES, broker_jars, java, packaged_java
from clawstream.local.servers.server_process import (
    HOST,
    EmbeddedServer,
    ServerProcess,
    last_lines,
    reserved,
    reserved_again,
    run_tool,
)

_USER = "clawstream"
_MECHANISM = "SCRAM-SHA-256"
_CREDENTIAL = "password"
_MODULES = "org.apache.kafka.common.security"
READY_WITHIN_S = 90.0
STOP_WITHIN_S = 15.0
_RECORDED_WITHIN_S = 120.0
_STARTED = "Kafka Server started"  # its last log line of a start: it lists itself, and takes requests
# The first compiler only: half the processor time of a start and 35 MB less, for a load that never needs the second.
_JVM = ("-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData",
        "-XX:+ExitOnOutOfMemoryError", "-Djava.awt.headless=true")  # fmt: skip


def new_password() -> str:
    """Return a password that needs no quoting anywhere."""
    return secrets.token_hex(24)


def password_in(folder: Path) -> str | None:
    """Return the password of the broker in `folder`; None: it lets everybody in."""
    try:
        return (folder / _CREDENTIAL).read_text()
    except FileNotFoundError:
        return None


def access_to(folder: Path, bootstrap: str) -> dict[str, Any]:
    """Return the Kafka settings of a client of the broker in `folder`, which is at `bootstrap`."""
    password = password_in(folder)
    if password is None:
        return {"bootstrap": bootstrap}
    return {
        "bootstrap": bootstrap,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": _MECHANISM,
        "sasl_username": _USER,
        "sasl_password": SecretStr(password),
    }


def listeners(port: int, controller_port: int, password: str | None) -> str:
    """Return the broker's settings for its two ports; with no password they are open to all on this machine."""
    if password is None:
        return (
            f"listeners=PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}\n"
            f"advertised.listeners=PLAINTEXT://{HOST}:{port}\n"
        )
    own = new_password()
    client, controller = "listener.name.client", "listener.name.controller"
    return (
        f"listeners=CLIENT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}\n"
        f"advertised.listeners=CLIENT://{HOST}:{port}\n"
        "listener.security.protocol.map=CLIENT:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT\n"
        "inter.broker.listener.name=CLIENT\n"
        f"sasl.mechanism.inter.broker.protocol={_MECHANISM}\n"
        f"{client}.sasl.enabled.mechanisms={_MECHANISM}\n"
        f"{client}.{_MECHANISM.lower()}.sasl.jaas.config={_MODULES}.scram.ScramLoginModule required "
        f'username="{_USER}" password="{password}";\n'
        "sasl.mechanism.controller.protocol=PLAIN\n"
        f"{controller}.sasl.enabled.mechanisms=PLAIN\n"
        f"{controller}.plain.sasl.jaas.config={_MODULES}.plain.PlainLoginModule required "
        f'username="broker" password="{own}" user_broker="{own}";\n'
    )


_CONFIG = Path(__file__).parent / "broker"
_DATA, _NEW_DATA = "data", "data.new"


class EmbeddedKafka(EmbeddedServer):
    """A broker on `data_dir`. Clients need the password in its folder, unless it is `open_to_all` on this machine.

    Raises PartUnavailable with the end of the broker's log if it does not get ready.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        fresh: bool = False,
        port: int | None = None,
        cache_dir: Path | None = None,
        open_to_all: bool = False,
        recorded_to: Path | None = None,
    ) -> None:
        super().__init__(data_dir, "kafka.log", fresh=fresh, port=port)
        self._open_to_all = open_to_all
        self._recorded_to = recorded_to
        self._cache_dir = accounts.cache_folder() if cache_dir is None else cache_dir.absolute()
        self._bootstrap: str | None = None

    @property
    def bootstrap(self) -> str:
        """host:port for clients."""
        assert self._bootstrap is not None, "read before __enter__"
        return self._bootstrap

    @property
    def access(self) -> dict[str, Any]:
        """The Kafka settings of its clients."""
        return {"bootstrap": self.bootstrap} if self._open_to_all else access_to(self.data_dir, self.bootstrap)

    def __enter__(self) -> Self:
        command = self._command()
        self._set_password_once(command)
        with (
            accounts.claimed(self.data_dir, fresh=self._fresh) as claim,
            reserved_again(self.data_dir, self._port) as port,
            reserved() as controller_port,
        ):
            self.data_dir.chmod(0o700)
            self._format_once(command)
            password = None if self._open_to_all else password_in(self.data_dir)
            settings = self.data_dir / "server.properties"
            accounts.write_private(settings, server_properties(_DATA, listeners(port, controller_port, password)))
            self._server_process = ServerProcess(
                [*command, "kafka.Kafka", settings.name], folder=self.data_dir, log=self.log, keep_fd=claim,
                grace_s=_RECORDED_WITHIN_S if self._recorded_to else STOP_WITHIN_S,
            )  # fmt: skip
            with self._server_process.once_ready(
                lambda: _STARTED in self.log.read_text(errors="replace"), READY_WITHIN_S,
                name=f"the Kafka broker on {self.data_dir}",
                instead="If that data may go, start with --fresh; or set CLAWSTREAM_KAFKA to the host:port of another "
                "broker",
            ):  # fmt: skip
                self._bootstrap = f"{HOST}:{port}"
                accounts.publish(self.data_dir, self._bootstrap)
        self._fresh, self._port = False, port
        return self

    def _command(self) -> list[str]:
        jars = broker_jars(self._cache_dir)
        if self._recorded_to:
            return java_command(java(), jars, f"-XX:AOTCacheOutput={self._recorded_to}")
        return java_command(java(), jars, *_loaded_classes(jars))

    def _format_once(self, command: Sequence[str]) -> None:
        """Format the data folder once, with a cluster id of its own; a half formatted one is formatted again."""
        if (self.data_dir / _DATA).is_dir():
            return
        shutil.rmtree(self.data_dir / _NEW_DATA, ignore_errors=True)
        settings, password = self.data_dir / "format.properties", new_password()
        accounts.write_private(settings, server_properties(_NEW_DATA, listeners(9092, 9093, None)))  # not listened on
        words = ["kafka.tools.StorageTool", "format", "--cluster-id", new_cluster_id(), "--config", settings.name]
        words += ["--add-scram", f"{_MECHANISM}=[name={_USER},password={password}]"]
        _run(command, words, self.data_dir, "could not be formatted")
        settings.unlink()
        accounts.write_private(self.data_dir / _CREDENTIAL, password)
        (self.data_dir / _NEW_DATA).rename(self.data_dir / _DATA)

    def _set_password_once(self, command: Sequence[str]) -> None:
        """Give a password to a broker's data that has none, by starting the broker once without one."""
        if self._open_to_all or self._fresh or password_in(self.data_dir) or not (self.data_dir / _DATA).is_dir():
            return
        with EmbeddedKafka(self.data_dir, cache_dir=self._cache_dir, open_to_all=True) as broker:
            password, file = new_password(), self.data_dir / "credential.properties"
            accounts.write_private(file, f"{_MECHANISM}=password={password}\n")
            words = ["kafka.admin.ConfigCommand", "--bootstrap-server", broker.bootstrap, "--alter"]
            words += ["--entity-type", "users", "--entity-name", _USER, "--add-config-file", file.name]
            _run(command, words, self.data_dir, "could not be given a password")
            file.unlink()
            accounts.write_private(self.data_dir / _CREDENTIAL, password)


def new_cluster_id() -> str:
    """Return 16 bytes in base64; the first is not random, as a leading "-" would be an option to Kafka's tools."""
    return base64.urlsafe_b64encode(b"\0" + secrets.token_bytes(15)).decode().rstrip("=")


def server_properties(log_dir: str, ports: str) -> str:
    """The broker's settings; `log_dir` is relative to the working directory, so no character of a path matters."""
    controller = ports.partition("CONTROLLER://")[2].partition("\n")[0]
    own = f"\nlog.dirs={log_dir}\ncontroller.quorum.voters=1@{controller}\n{ports}"
    return (_CONFIG / "server.properties").read_text() + own


def _run(command: Sequence[str], words: Sequence[str], folder: Path, what: str) -> None:
    """Run a tool of Kafka's with arguments in a file: they may be secret, and all users see command lines."""
    arguments = folder / "told"
    accounts.write_private(arguments, "\n".join(f'"{word}"' for word in words))
    status, last = run_tool([*command, f"@{arguments.name}"], folder, READY_WITHIN_S)
    arguments.unlink()
    if status != 0:
        raise PartUnavailable(
            f"Kafka's storage in {folder} {what}: exit status {status}. "
            f"Nothing was started. If the lines below speak of a class version, JAVA_HOME names a Java before 17. "
            f"{KAFKA_REMEDIES}. The last words:\n{last}"
        )


def java_command(program: Path, jars: Path, *options: str) -> list[str]:
    """Java, which is `program`, with the broker's classes, up to the name of the class to run."""
    log_config = (_CONFIG / "log4j2.properties").as_uri()
    return [str(program), *_JVM, *options, f"-Dlog4j2.configurationFile={log_config}", "-cp", f"{jars}/*"]


def _loaded_classes(jars: Path) -> tuple[str, ...]:
    """Return options by which Java finds the broker's classes loaded and linked already: half the time of a start.

    One start and stop of a broker, once per user and Java, keeps them in a file beside the jars (JEP 514, 65 MB). There
    are none for a Java that JAVA_HOME names, nor where the file can't be made: then the broker starts without.
    """
    version = packaged_java()
    if version is None:
        return ()
    try:
        folder = accounts.made_once(
            jars.with_name(f"{jars.name}-java-{version}"), lambda folder: _record(folder, jars.parent),
            within_s=READY_WITHIN_S + 2 * _RECORDED_WITHIN_S,
        )  # fmt: skip
    except (PartUnavailable, OSError) as error:
        Console(stderr=True).print(f"Kafka starts more slowly: {error}", soft_wrap=True, highlight=False, markup=False)
        return ()
    return (f"-XX:AOTCache={folder / _CLASSES}", "-Xlog:aot*=off")


_CLASSES = "classes.aot"


def _record(folder: Path, cache_dir: Path) -> None:
    Console(stderr=True).print("preparing Kafka's classes (once)", highlight=False)
    file = folder / _CLASSES
    with EmbeddedKafka(folder / "broker", cache_dir=cache_dir, recorded_to=file) as broker:
        pass  # Java writes the file when it ends
    if not file.exists():
        raise PartUnavailable(
            f"its classes could not be kept in {file}. The next start tries again. The end of the broker's log:\n"
            f"{last_lines(broker.log.read_text(errors='replace'))}"
        )
    shutil.rmtree(folder / "broker")
