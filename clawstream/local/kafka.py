"""A Kafka broker of our own, in KRaft mode, for one machine.

It is ready when it lists itself as a broker that takes requests, and not before.
"""

import base64
import shutil
import socket
import struct
import subprocess
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from clawstream.errors import PartUnavailable
from clawstream.local import places
from clawstream.local.jars import KAFKA_REMEDIES, broker_jars
from clawstream.local.leash import Leash
from clawstream.local.ports import HOST, reserved

READY_WITHIN_S = 90.0
STOP_WITHIN_S = 15.0
_LOOK_EVERY_S = 0.02
_CONFIG = Path(__file__).parent / "broker"
_CORRELATION = 0x636C6177  # comes back in the reply; a server that is no broker does not say it
_DATA, _NEW_DATA = "data", "data.new"
# The first compiler only: half the processor time of a start and 35 MB less, for a load that never needs the second.
_JVM = ("-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData",
        "-XX:+ExitOnOutOfMemoryError", "-Djava.awt.headless=true")  # fmt: skip


class EmbeddedKafka:
    """A broker on `data_dir`, from `__enter__` to `__exit__` and never longer than this process.

    What it holds is kept between runs; `fresh` empties it first. Raises PartUnavailable with the end of the broker's
    log if it does not get ready.
    """

    def __init__(
        self, data_dir: Path, *, fresh: bool = False, port: int | None = None, cache_dir: Path | None = None
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.log = self.data_dir / "kafka.log"
        self._fresh = fresh
        self._port = port
        self._cache_dir = places.cache_folder() if cache_dir is None else cache_dir.absolute()
        self._leash: Leash | None = None
        self._bootstrap: str | None = None

    @property
    def bootstrap(self) -> str:
        """host:port for clients."""
        assert self._bootstrap is not None, "read before __enter__"
        return self._bootstrap

    def __enter__(self) -> Self:
        java = _java()
        jars = broker_jars(self._cache_dir)
        with (
            places.claimed(self.data_dir, fresh=self._fresh) as claim,
            reserved(self._port, setting="kafka.port") as port,
            reserved() as controller_port,
        ):
            _keep_one_old_log(self.log)
            self._format_once(java, jars)
            settings = self.data_dir / "server.properties"
            settings.write_text(server_properties(_DATA, port, controller_port))
            self._leash = Leash(
                [*java_command(java, jars), "kafka.Kafka", settings.name],
                folder=self.data_dir, log=self.log, grace_s=STOP_WITHIN_S, keep_fd=claim,
            )  # fmt: skip
            try:
                self._wait_until_ready(self._leash, port)
            except BaseException:
                self._leash.stop()
                raise
        self._bootstrap = f"{HOST}:{port}"
        places.publish(self.data_dir, self._bootstrap)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._leash is not None:
            self._leash.stop()

    def exit_status(self) -> int | None:
        """None while the broker runs; else its exit status."""
        assert self._leash is not None, "asked before __enter__"
        return self._leash.exit_status()

    def _format_once(self, java: str, jars: Path) -> None:
        """A data folder has a cluster id of its own for life; one that was half formatted is formatted again."""
        if (self.data_dir / _DATA).is_dir():
            return
        shutil.rmtree(self.data_dir / _NEW_DATA, ignore_errors=True)
        settings = self.data_dir / "format.properties"
        settings.write_text(server_properties(_NEW_DATA, 9092, 9093))  # ports are read and not used
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        done = subprocess.run(
            [*java_command(java, jars), "kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}",
             "--config", settings.name],
            cwd=self.data_dir, capture_output=True, text=True, timeout=READY_WITHIN_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            words = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            raise PartUnavailable(
                f"Kafka's storage in {self.data_dir} could not be formatted: exit status {done.returncode}. "
                f"Nothing was started. If the lines below speak of a class version, Java is older than 17. "
                f"{KAFKA_REMEDIES}. The last words:\n{words}"
            )
        settings.unlink()
        (self.data_dir / _NEW_DATA).rename(self.data_dir / _DATA)

    def _wait_until_ready(self, leash: Leash, port: int) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while leash.exit_status() is None and time.monotonic() < deadline:
            if answers(f"{HOST}:{port}"):
                return
            time.sleep(_LOOK_EVERY_S)
        status = leash.exit_status()
        what = f"did not answer within {READY_WITHIN_S:g} s" if status is None else f"ended with exit status {status}"
        raise PartUnavailable(
            f"the Kafka broker on {self.data_dir} {what}. It was stopped; its data is as it was. "
            "If that data may go, start with --fresh; or set CLAWSTREAM_KAFKA to the host:port of another broker. "
            f"The end of its log, {self.log}:\n{leash.last_words()}"
        )


def server_properties(log_dir: str, port: int, controller_port: int) -> str:
    """The broker's settings; `log_dir` is relative to the working directory, so no character of a path matters."""
    return (_CONFIG / "server.properties").read_text() + (
        f"\nlog.dirs={log_dir}\n"
        f"listeners=PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}\n"
        f"advertised.listeners=PLAINTEXT://{HOST}:{port}\n"
        f"controller.quorum.voters=1@{HOST}:{controller_port}\n"
    )


def java_command(java: str, jars: Path) -> list[str]:
    """Java with the broker's classes, up to the name of the class to run."""
    log_config = (_CONFIG / "log4j2.properties").as_uri()
    return [java, *_JVM, f"-Dlog4j2.configurationFile={log_config}", "-cp", f"{jars}/*"]


def answers(bootstrap: str, *, timeout_s: float = 2.0) -> bool:
    """Whether the broker at host:port answers a metadata request with at least one broker that takes requests."""
    host, _, port = bootstrap.rpartition(":")
    request = struct.pack(">hhihi", 3, 0, _CORRELATION, -1, 0)  # Metadata, version 0, no client id, all topics
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            reply = connection.makefile("rb").read(12)
    except OSError:
        return False
    if len(reply) < 12:
        return False
    _size, correlation, num_brokers = struct.unpack(">iii", reply)
    return bool(correlation == _CORRELATION and num_brokers >= 1)


def _java() -> str:
    java = shutil.which("java")
    if java is None:
        raise PartUnavailable(f"Kafka needs Java, and `java` is not on PATH. Nothing was started. {KAFKA_REMEDIES}")
    return java


def _keep_one_old_log(log: Path) -> None:
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
