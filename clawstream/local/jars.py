"""The broker's jars: fetched once per user with Maven, from the versions that pom.xml pins.

A folder of jars is whole or not there: it is filled under another name and renamed into place.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from clawstream import locks
from clawstream.errors import PartUnavailable

POM = Path(__file__).parent / "broker" / "pom.xml"
FETCH_WITHIN_S = 900.0
KAFKA_REMEDIES = (
    "Do one of these: install Java 17 (or newer) and Maven; or set CLAWSTREAM_KAFKA to the host:port of a broker; "
    "or run a Docker engine and in it `docker run -d -p 9092:9092 apache/kafka:4.1.0`, with "
    "CLAWSTREAM_KAFKA=127.0.0.1:9092 (the tests use a Docker engine by themselves)"
)


def broker_jars(cache: Path) -> Path:
    """The folder with the jars below `cache`, fetched if it is not there; says so on stderr."""
    folder = cache / f"kafka-4.1.0-{hashlib.sha256(POM.read_bytes()).hexdigest()[:8]}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with locks.locked(cache / f"{folder.name}.lock", within_s=FETCH_WITHIN_S):
        if not folder.is_dir():
            _fetch(folder)
    return folder


def _fetch(folder: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise PartUnavailable(
            f"Kafka's jars are not in {folder}, and Maven (`mvn`), which fetches them, is not on PATH. "
            f"Nothing was started. {KAFKA_REMEDIES}"
        )
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    print(f"clawstream: fetching Kafka 4.1.0 (43 MB, once) with Maven into {folder}", file=sys.stderr, flush=True)
    command = [
        maven, "--quiet", "--batch-mode", "--strict-checksums", "--file", str(POM), "dependency:copy-dependencies",
        "-DincludeScope=runtime", f"-DoutputDirectory={partial}",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=folder.parent, capture_output=True, text=True, timeout=FETCH_WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise PartUnavailable(
            f"Maven did not fetch Kafka's jars within {FETCH_WITHIN_S:g} s. Nothing was started; the next try resumes. "
            f"{KAFKA_REMEDIES}"
        ) from error
    if done.returncode != 0 or not any(partial.glob("kafka_*.jar")):
        words = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise PartUnavailable(
            f"Maven could not fetch Kafka's jars: exit status {done.returncode}. Nothing was started. "
            f"{KAFKA_REMEDIES}. Its last words:\n{words}"
        )
    partial.rename(folder)
