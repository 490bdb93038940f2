"""A model's folder: what it says of the model, which base a policy begins with, and the folders of its versions.

A folder that can't be seen from here is no error, since an engine may run on another machine. Samples of one base must
not train another, so the policy topic names the base by its hashes, and every part first compares its own base with
them. The topic also has the sha256 of each version's manifest, and the manifest has the sha256 of each file. So the
bytes of a version can be checked wherever they came from.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from clawstream.errors import ConfigError, OtherBase, UnusableCheckpoint
from clawstream.events import BaseNamed, PolicyEvent

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SAMPLE_TOKENS = 2000
MANIFEST = "manifest.json"
ADAPTER_CONFIG = "adapter_config.json"  # peft's description of an adapter
STATE_FOLDER = "trainer"  # apart from the weights: engines load every safetensors file they find beside config.json
_WEIGHTS = frozenset({".safetensors", ".bin"})
_VOCABULARY = frozenset(
    {"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "tekken.json"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """The type and shape of a tensor, from a safetensors file's header."""

    dtype: str  # as safetensors names it: F32, BF16, I8, F8_E4M3, ...
    shape: tuple[int, ...]


def text_config(folder: Path) -> dict[str, Any] | None:
    """Return what config.json says of the language model; None where it can't be read."""
    found = whole_config(folder)
    inner = (found or {}).get("text_config")
    return found | inner if found is not None and isinstance(inner, dict) else found


def whole_config(folder: Path) -> dict[str, Any] | None:
    """Return what config.json says of the whole model; None where it can't be read."""
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def weight_files(folder: Path) -> list[Path]:
    """Return all safetensors files of a model folder. Raises UnusableCheckpoint where one is missing."""
    index = folder / INDEX
    try:
        listed = json.loads(index.read_bytes())["weight_map"].values() if index.is_file() else [SINGLE]
        names = set(listed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableCheckpoint(f"{index} can't be read ({error}); the weights in use stay") from error
    absent = sorted(name for name in names if not (folder / name).is_file())
    if absent:
        raise UnusableCheckpoint(f"{folder} has no {absent[0]}; the weights in use stay, give a complete model folder")
    return [folder / name for name in sorted(names)]


def tensor_headers(folder: Path) -> dict[str, TensorHeader] | None:
    """Return the headers of all tensors by name; None where no weights in safetensors can be seen.

    Raises UnusableCheckpoint where a file that must be there is not, or is cut short.
    """
    if not ((folder / INDEX).is_file() or (folder / SINGLE).is_file()):
        return None
    found: dict[str, TensorHeader] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    tensor = tensors.get_slice(name)
                    found[name] = TensorHeader(dtype=tensor.get_dtype(), shape=tuple(tensor.get_shape()))
        except (OSError, SafetensorError) as error:
            raise UnusableCheckpoint(f"{file}: {error}; the weights in use stay, write the checkpoint again") from error
    return found


def largest_token_id(folder: Path, added: Iterable[int]) -> int:
    """Return the largest id that the tokenizer in `folder` can give, including `added`, ids added to it later.

    Without a tokenizer.json only `added` are known.
    """
    tokenizer = vocabulary(folder)
    known = () if tokenizer is None else tokenizer.get_vocab(with_added_tokens=True).values()
    return max((*known, *added), default=-1)


def too_small_for(token_id: int, folder: Path) -> str | None:
    """Return why the model in `folder` can't be given the id; None: it can, or its config.json can't be read here."""
    size = num_embeddings(folder)
    if size is None or token_id < size:
        return None
    return f"the policy's tokenizer can give id {token_id}, and the vocab_size of {folder / 'config.json'} is {size}"


def num_embeddings(folder: Path) -> int | None:
    """Return how many token ids the model in `folder` has; None where its config.json does not say it here."""
    size = (text_config(folder) or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def vocabulary(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of the model in `folder`; None where it has no tokenizer.json."""
    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def difference(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    """Say which token of `ours` is the first that does not have the same id in `theirs`; None: all have."""
    known = theirs.get_vocab(with_added_tokens=True)
    for token, id_ in sorted(ours.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]):
        if known.get(token) != id_:
            return f"token {token!r} has id {known.get(token)}, expected {id_}"
    return None


def vocabulary_sample(tokenizer: Tokenizer) -> str:
    """Return a text of tokens from all over the vocabulary, fewer than twice `_SAMPLE_TOKENS` of them."""
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    chosen = ids[:: max(1, len(ids) // _SAMPLE_TOKENS)]
    return "\n".join(tokenizer.decode([id_], skip_special_tokens=False) for id_ in chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of a version."""

    name: str  # its path inside the version's folder
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
    """Return the manifest's files. Raises ValueError where it is no manifest, or names a file outside its folder."""
    try:
        files = [File(**file) for file in json.loads(manifest)["files"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{len(manifest)} bytes that are no manifest ({error!r})") from error
    for file in files:
        path = PurePosixPath(file.name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in file.name:
            raise ValueError(f"it names {file.name!r}, which is not inside the version's folder")
    return files


def put_whole(writing: Path, place: Path) -> None:
    """Force a version's files to disk, then rename their folder to its place; what was there is replaced."""
    for path in [*writing.rglob("*"), writing]:
        force_to_disk(path)
    if place.exists():
        remove_whole(place)
    writing.rename(place)
    force_to_disk(place.parent)


def remove_whole(folder: Path) -> None:
    """Remove a version; it is renamed first, so an interrupted removal leaves no half of it in its place."""
    aside = folder.with_name(f".removing-{folder.name}")
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)
    force_to_disk(folder.parent)
    shutil.rmtree(aside)


def force_to_disk(path: Path) -> None:
    """Return once the file, or the folder's list of names, survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


Digest = Callable[[Path], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The hashes that identify a model folder's contents."""

    path: Path
    model_sha256: str | None  # None: no weights are there
    tokenizer_sha256: str | None  # None: no file of a vocabulary is there


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


def naming_event(
    policy_id: str, base: Base, events: Sequence[PolicyEvent], *, checkpoints_dir: Path, now_ms: int
) -> BaseNamed | None:
    """Return the event that names `base` on the log of a policy; None: the log names it already.

    `events` are those of the policy. Raises OtherBase where they say that the policy began with another base. A log
    without its beginning names no base: then the policy's checkpoints are compared.
    """
    refuse_other(policy_id, base, events)
    model, tokenizer = _named(events)
    names_the_model = model is None and base.model_sha256 is not None
    if names_the_model:
        _refuse_other_checkpoints(policy_id, base, checkpoints_dir)
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


def _refuse_other_checkpoints(policy_id: str, base: Base, checkpoints_dir: Path) -> None:
    """Raise OtherBase where the newest checkpoint began with another base; one that can't be read is not refused."""
    for state in sorted(checkpoints_dir.glob(f"v*/{STATE_FOLDER}/state.json"), reverse=True)[:1]:
        with suppress(OSError, ValueError, KeyError, TypeError):
            began = json.loads(state.read_bytes())["base_sha256"]
            if began != base.model_sha256:
                raise _other(policy_id, base, "model", began, f"by {state}")


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
