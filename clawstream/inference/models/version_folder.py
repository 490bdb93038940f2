"""The folder of a policy version, which the trainer writes and others take over elsewhere.

The manifest names every file with its size and sha256; the policy topic names the manifest's sha256. So a reader of the
log can check a version's bytes, wherever they came from.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

MANIFEST = "manifest.json"
ADAPTER_CONFIG = "adapter_config.json"  # peft's description of an adapter
STATE_FOLDER = "trainer"  # apart from the weights: engines load every safetensors file they find beside config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of a version."""

    name: str  # with its folder, inside the version's
    num_bytes: int
    sha256: str

    @property
    def is_for_engines(self) -> bool:
        """Whether engines need the file; the others are state that the trainer resumes from."""
        return PurePosixPath(self.name).parts[0] != STATE_FOLDER


def version_name(version: int) -> str:
    """Return the name of the version's folder."""
    return f"v{version:06d}"


def files_of(manifest: bytes) -> Sequence[File]:
    """Return the files that the manifest names. Raises ValueError for no manifest, or a file outside its folder."""
    try:
        files = [File(**file) for file in json.loads(manifest)["files"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{len(manifest)} bytes that are no manifest ({error!r})") from error
    for file in files:
        path = PurePosixPath(file.name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in file.name:
            raise ValueError(f"it names {file.name!r}, which is not inside the version's folder")
    return files
