"""Which model a policy begins with, known by its bytes; and the folder of a policy version.

A sample is tokens and log-probs of one model, and means nothing to another. So the policy topic names the base by its
hashes, and every part that has a base looks there before it does anything. A version's manifest names every file with
its size and sha256, and the policy topic names the manifest's sha256, so a reader of the log can check a version's
bytes wherever they came from.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from clawstream.errors import ConfigError, OtherBase
from clawstream.events import BaseNamed, PolicyEvent

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


_WEIGHTS = frozenset({".safetensors", ".bin"})
_VOCABULARY = frozenset(
    {"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "tekken.json"}
)
Digest = Callable[[Path], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The hashes that identify a model folder's contents."""

    path: Path
    model_sha256: str | None  # None: no weights are there
    tokenizer_sha256: str | None  # None: no vocabulary's file is there


def base_in(folder: Path, cache_dir: Path) -> Base:
    """Return the folder's hashes; a file is hashed again only where its size or time of change differs.

    Raises ConfigError where the folder can't be read.
    """
    digest = _remembered(cache_dir / "sha256")
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        vocabulary = [path for path in files if path.name in _VOCABULARY or path.suffix == ".tiktoken"]
        return Base(
            path=folder,
            model_sha256=fingerprint(folder, digest) if any(path.suffix in _WEIGHTS for path in files) else None,
            tokenizer_sha256=_of_all(folder, vocabulary, digest) if vocabulary else None,
        )
    except OSError as error:
        raise ConfigError(
            f"engine.model_path {folder} can't be read ({error}); nothing was started. Name the policy's Hugging Face "
            "folder"
        ) from error


def sha256_of_file(path: Path) -> str:
    """Return the sha256 of the file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(folder: Path, digest: Digest = sha256_of_file) -> str:
    """Return the sha256 of a model folder's weights and configuration, by which a base is known wherever it lies."""
    return _of_all(folder, [p for p in folder.iterdir() if p.suffix in _WEIGHTS or p.name == "config.json"], digest)


def to_name(policy_id: str, base: Base, events: Sequence[PolicyEvent], *, now_ms: int) -> BaseNamed | None:
    """Return the event that names `base` on the log of a policy; None: the log names it already.

    `events` are those of the policy. Raises OtherBase where they name another base.
    """
    refuse_other(policy_id, base, events)
    model, tokenizer = _named(events)
    names_the_model = model is None and base.model_sha256 is not None
    if not names_the_model and (tokenizer is not None or base.tokenizer_sha256 is None):
        return None
    return BaseNamed(
        policy_id=policy_id,
        path=str(base.path.absolute()),
        model_sha256=base.model_sha256,
        tokenizer_sha256=base.tokenizer_sha256,
        named_at_ms=now_ms,
    )


def refuse_other(policy_id: str, base: Base, events: Sequence[PolicyEvent]) -> None:
    """Raise OtherBase where the events of a policy name another base."""
    model, tokenizer = _named(events)
    if model is not None and base.model_sha256 not in (None, model.model_sha256):
        raise _other(policy_id, base, "model", model.model_sha256, f"on the log, of {model.path}")
    if tokenizer is not None and base.tokenizer_sha256 not in (None, tokenizer.tokenizer_sha256):
        raise _other(policy_id, base, "tokenizer", tokenizer.tokenizer_sha256, f"on the log, of {tokenizer.path}")


def _named(events: Sequence[PolicyEvent]) -> tuple[BaseNamed | None, BaseNamed | None]:
    """Return the first event that named the model, and the first that named the tokenizer."""
    named = [event for event in events if isinstance(event, BaseNamed)]
    return (
        next((event for event in named if event.model_sha256 is not None), None),
        next((event for event in named if event.tokenizer_sha256 is not None), None),
    )


def _other(policy_id: str, base: Base, what: str, began: str | None, where: str) -> OtherBase:
    found = base.model_sha256 if what == "model" else base.tokenizer_sha256
    return OtherBase(
        f"policy.id {policy_id} began with another base: its {what} has sha256 {(began or 'none')[:12]} ({where}), and "
        f"that in {base.path} has {(found or 'none')[:12]}. What one model said is never trained into another, so "
        "nothing was started. Give this base a policy.id of its own (or a data_dir), or name the folder that the "
        "policy began with in engine.model_path"
    )


def _of_all(folder: Path, paths: Sequence[Path], digest: Digest) -> str:
    files = [
        File(name=path.relative_to(folder).as_posix(), num_bytes=path.stat().st_size, sha256=digest(path))
        for path in sorted(paths)
    ]
    return hashlib.sha256(json.dumps([asdict(file) for file in files]).encode()).hexdigest()


def _remembered(folder: Path) -> Digest:
    """Return a hash function that caches by a file's size and time of change, if the cache can be written."""

    def digest(path: Path) -> str:
        facts = path.stat()
        mark = f"{path.absolute()}\n{facts.st_size}\n{facts.st_mtime_ns}\n{facts.st_ino}"
        kept = folder / hashlib.sha256(mark.encode()).hexdigest()
        with suppress(OSError):
            known = kept.read_text()
            if len(known) == hashlib.sha256().digest_size * 2:
                return known
        sha256 = sha256_of_file(path)
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            writing = kept.with_suffix(f".{time.time_ns()}")
            writing.write_text(sha256)
            writing.rename(kept)
        return sha256

    return digest
