"""The embedded broker: kept between runs, ended with its owner, and clear about what it lacks."""

import asyncio
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.structs import TopicPartition

from clawstream.errors import PartUnavailable
from clawstream.local import jars, kafka, places
from clawstream.local.kafka import EmbeddedKafka, answers
from clawstream.local.ports import HOST, reserved

MIB = 2**20
OWNER = """
import sys, time
from pathlib import Path
from clawstream.local.kafka import EmbeddedKafka
with EmbeddedKafka(Path(sys.argv[1])) as broker:
    print(broker.bootstrap, flush=True)
    time.sleep(60)
"""


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
    with EmbeddedKafka(folder) as again:
        assert places.address_in(folder) == again.bootstrap
        assert asyncio.run(read(again.bootstrap)) == record
    assert again.exit_status() == 128 + signal.SIGTERM
    assert places.address_in(folder) is None
    with EmbeddedKafka(folder, fresh=True) as emptied:
        assert asyncio.run(topics(emptied.bootstrap)) == set()


def test_a_broker_whose_port_is_taken_does_not_start(tmp_path: Path) -> None:
    with reserved() as port, pytest.raises(PartUnavailable, match=f"port {port}"):
        EmbeddedKafka(tmp_path / "kafka", port=port).__enter__()


def test_a_broker_that_cannot_start_says_why_and_leaves_its_data(folder: Path) -> None:
    if not (folder / "data").is_dir():
        with EmbeddedKafka(folder):
            pass
    identity = folder / "data" / "meta.properties"
    whole = identity.read_text()
    identity.write_text(whole.replace("node.id=1", "node.id=2"))
    with pytest.raises(
        PartUnavailable, match=r"(?s)exit status 1.*--fresh.*CLAWSTREAM_KAFKA.*kafka\.log.*Stored node id 2"
    ):
        EmbeddedKafka(folder).__enter__()
    identity.write_text(whole)


@pytest.mark.parametrize("there", ["no java", "java, no maven"])
def test_what_is_missing_is_named_with_the_three_remedies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: str
) -> None:
    if there != "no java":
        (tmp_path / "java").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PartUnavailable) as raised:
        EmbeddedKafka(tmp_path / "kafka", cache_dir=tmp_path / "cache").__enter__()
    said = str(raised.value)
    assert ("`java` is not on PATH" if there == "no java" else "`mvn`") in said
    assert all(remedy in said for remedy in ("Java 17 (or newer) and Maven", "CLAWSTREAM_KAFKA", "Docker"))
    assert not (tmp_path / "kafka").exists()


def use_maven(monkeypatch: pytest.MonkeyPatch, folder: Path, jar: str) -> None:
    """Put a program named mvn on PATH that notes its call and writes one file, as slowly as a shell does."""
    maven = folder / "mvn"
    maven.write_text(
        "#!/bin/sh\nfor option; do case $option in -DoutputDirectory=*) to=${option#*=};; esac; done\n"
        f'echo called >> {folder}/calls; mkdir "$to" && touch "$to/{jar}"\n'
    )
    maven.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_jars_of_a_broken_fetch_are_never_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_maven(monkeypatch, tmp_path, "half.jar")
    for _ in range(2):
        with pytest.raises(PartUnavailable, match="Maven could not fetch"):
            jars.broker_jars(tmp_path / "cache")


def test_many_that_want_the_jars_at_once_fetch_them_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_maven(monkeypatch, tmp_path, "kafka_2.13.jar")
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(jars.broker_jars, [tmp_path / "cache"] * 4))
    assert [[jar.name for jar in folder.iterdir()] for folder in folders] == [["kafka_2.13.jar"]]
    assert (tmp_path / "calls").read_text() == "called\n"


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
