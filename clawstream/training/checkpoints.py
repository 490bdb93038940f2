"""Versions of a policy as folders, each whole or not there at all, and offered to engines on other machines.

A folder is written beside its place, the manifest last, and renamed once every file is on disk. So a folder whose
manifest agrees with its files is complete; any other is refused or skipped. The state that training goes on from is a
folder within the version's, whole or not there in the same way. It is written once the version is published, and is
several times as large as the weights. A version whose state is missing is served, and its step is taken again.

Another machine fetches GET /versions/v000007/manifest.json, then each file that the manifest names. Nothing else of the
disk can be fetched. An interrupted download goes on where it stopped (RFC 9110, 14: Range).
"""

import hashlib
import hmac
import json
import logging
import re
import shutil
from collections.abc import AsyncIterator, Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from clawstream.config import WeightsSettings
from clawstream.errors import ConfigError, UnusableCheckpoint
from clawstream.events import BatchPlanned, FollowedHint, KeptHint, PlannedTurn, Rehearsed, StepTaken, TopicOffset
from clawstream.inference.http_borders import guard_origin
from clawstream.inference.model_folder import (
    ADAPTER_CONFIG,
    MANIFEST,
    STATE_FOLDER,
    File,
    files_of,
    force_to_disk,
    put_whole,
    remove_whole,
    sha256_of_file,
    version_name,
)
from clawstream.locks import locked

log = logging.getLogger(__name__)

FORMAT = 1
HASHED_AT_ONCE = 8
_LOCK = ".lock"
_NAME = re.compile(r"v(\d{6,})")
_ASIDE = re.compile(r"\.(writing|removing)-v\d{6,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete version on disk: the plan that it executed, what its step did, and its files."""

    path: Path
    plan: BatchPlanned
    step: StepTaken
    files: tuple[File, ...]
    manifest_sha256: str

    @property
    def version(self) -> int:
        """The policy version."""
        return self.plan.policy_version

    @property
    def num_bytes(self) -> int:
        """The size of all files but the manifest."""
        return sum(file.num_bytes for file in self.files)

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter on the base's weights, not a full set of weights."""
        return any(file.name == ADAPTER_CONFIG for file in self.files)


@contextmanager
def alone_on(root: Path) -> Iterator[None]:
    """Hold the lock for writing versions here; raises PartUnavailable where another process holds it."""
    root.mkdir(parents=True, exist_ok=True)
    in_use = (
        f"{root}: another process trains this policy. Two would take different steps under one version's name, so "
        "nothing is trained here. Stop that process, or give this policy an id of its own (policy.id)"
    )
    with locked(root / _LOCK, within_s=0, in_use=in_use):
        yield


def write(root: Path, plan: BatchPlanned, step: StepTaken, save: Callable[[Path], None]) -> Checkpoint:
    """Let `save` fill a folder with what engines load, then put it whole in its place; what was there is replaced."""
    target = root / version_name(plan.policy_version)
    _write(target, save, lambda files: _manifest(plan, step, files))
    return read(target, contents=False)


def write_state(version: Path, save: Callable[[Path], None]) -> None:
    """Let `save` fill a folder with what training goes on from, then put it whole beside the version's weights."""
    _write(version / STATE_FOLDER, save, lambda files: _as_json({"files": [asdict(file) for file in files]}))


def _write(place: Path, save: Callable[[Path], None], manifest: Callable[[tuple[File, ...]], bytes]) -> None:
    writing = place.with_name(f".writing-{place.name}")
    for left in (writing, place.with_name(f".removing-{place.name}")):
        if left.exists():
            shutil.rmtree(left)
    writing.mkdir(parents=True)
    save(writing)
    (writing / MANIFEST).write_bytes(manifest(_on_disk(writing)))
    put_whole(writing, place)


def _on_disk(folder: Path) -> tuple[File, ...]:
    """Return all files of the folder, hashed while they are forced to disk."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        forced, hashes = pool.map(force_to_disk, paths), pool.map(sha256_of_file, paths)
        list(forced)
        return tuple(
            File(name=path.relative_to(folder).as_posix(), num_bytes=path.stat().st_size, sha256=sha256)
            for path, sha256 in zip(paths, hashes, strict=True)
        )


def read(folder: Path, *, contents: bool = True) -> Checkpoint:
    """Return the checkpoint, once each of its files is verified: its presence, size and, with `contents`, sha256.

    Raises UnusableCheckpoint naming the file, what was found and what the manifest says.
    """
    try:
        raw = (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _unusable(folder, MANIFEST, "nothing", "a manifest, which is written last") from error
    try:
        checkpoint = _checkpoint(folder, json.loads(raw), hashlib.sha256(raw).hexdigest())
    except (ValueError, KeyError, TypeError) as error:
        raise _unusable(folder, MANIFEST, f"{len(raw)} bytes that are no manifest ({error!r})", "a manifest") from error
    if version_name(checkpoint.version) != folder.name:
        raise _unusable(folder, MANIFEST, f"version {checkpoint.version}", "the version of its folder's name")
    for file in checkpoint.files:
        _verify(folder, file, contents=contents)
    return checkpoint


def resumable(folder: Path, *, contents: bool = True) -> Checkpoint:
    """Return the checkpoint, once it is verified as by `read`, together with the state that training goes on from.

    Raises UnusableCheckpoint as `read` does.
    """
    checkpoint = read(folder, contents=contents)
    if not all(file.is_for_engines for file in checkpoint.files):
        return checkpoint  # written by a release that had one manifest for both
    state = folder / STATE_FOLDER
    try:
        raw = (state / MANIFEST).read_bytes()
        files = files_of(raw)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _stateless(folder, "no state", "one, which is written once the weights are published") from error
    except ValueError as error:
        raise _stateless(folder, f"{len(raw)} bytes that are no manifest ({error})", "the state's manifest") from error
    for file in files:
        try:
            _verify(state, file, contents=contents)
        except UnusableCheckpoint as error:
            raise _stateless(folder, f"{file.name} that is not as it was written", "the state whole") from error
    return checkpoint


def _stateless(folder: Path, found: str, expected: str) -> UnusableCheckpoint:
    return UnusableCheckpoint(
        f"checkpoint {folder}: in {STATE_FOLDER}/ found {found}, expected {expected}. Its weights stay, and engines "
        "may serve them. Training goes on from it once its step is taken again, as `clawstream train` does at its start"
    )


def standing(root: Path, version: int) -> Checkpoint | None:
    """Return the version if its weights are complete, whatever its state; None: it has to be written."""
    with suppress(UnusableCheckpoint):
        return read(root / version_name(version))
    return None


def latest(root: Path) -> Checkpoint | None:
    """Return the newest checkpoint that training can go on from; others are skipped and logged. None: there is none."""
    return _newest(root, resumable, above=-1)


def unfinished(root: Path, *, above: int) -> Checkpoint | None:
    """Return the newest version above that one whose weights are complete, whatever its state; None: there is none."""
    return _newest(root, read, above=above)


def _newest(root: Path, verified: Callable[[Path], Checkpoint], *, above: int) -> Checkpoint | None:
    for version in sorted((version for version in _versions(root) if version > above), reverse=True):
        try:
            return verified(root / version_name(version))
        except UnusableCheckpoint as error:
            log.warning("checkpoint_passed_over version=%d reason=%s", version, error)
    return None


def prune(root: Path, *, keep: int, needed: Container[int | None]) -> tuple[int, ...]:
    """Remove all but the newest `keep` versions, and the remains of interrupted writes; return the versions removed.

    The `needed` versions stay, however old; so does the newest, from which training resumes.
    """
    for path in root.iterdir():
        if _ASIDE.fullmatch(path.name):
            shutil.rmtree(path)
    complete = sorted(v for v in _versions(root) if (root / version_name(v) / MANIFEST).exists())
    removed = tuple(v for v in complete[: -max(keep, 1)] if v not in needed)
    for version in removed:
        remove_whole(root / version_name(version))
    return removed


def _versions(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    return [int(match[1]) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]


def _manifest(plan: BatchPlanned, step: StepTaken, files: tuple[File, ...]) -> bytes:
    """Return the manifest; no byte follows its closing brace, so a manifest cut anywhere is not valid."""
    planned = asdict(plan) | {"settings": plan.settings.decode()}
    body = {"format": FORMAT, "plan": planned, "step": asdict(step), "files": [asdict(file) for file in files]}
    return _as_json(body)


def _as_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, indent=1).encode()


def _checkpoint(folder: Path, body: dict[str, Any], sha256: str) -> Checkpoint:
    if body["format"] != FORMAT:
        raise _unusable(folder, MANIFEST, f"format {body['format']}", f"format {FORMAT}")
    plan = body["plan"]
    parts = {
        "offsets": tuple(TopicOffset(**offset) for offset in plan["offsets"]),
        "sample_ids": tuple(plan["sample_ids"]),
        "settings": plan["settings"].encode(),
        "turns": tuple(PlannedTurn(**turn) for turn in plan["turns"]),
    }
    return Checkpoint(
        path=folder,
        plan=BatchPlanned(**plan | parts),
        step=StepTaken(**body["step"] | _hints_of(body["step"])),
        files=tuple(File(**file) for file in body["files"]),
        manifest_sha256=sha256,
    )


def _hints_of(step: dict[str, Any]) -> dict[str, Any]:
    kinds = (("rehearsed", Rehearsed), ("followed", FollowedHint), ("kept", KeptHint))
    return {name: tuple(kind(**one) for one in step.get(name, ())) for name, kind in kinds}


def _verify(folder: Path, file: File, *, contents: bool) -> None:
    path = folder / file.name
    if not path.is_file():
        raise _unusable(folder, file.name, "nothing", f"{file.num_bytes} bytes")
    if (found := path.stat().st_size) != file.num_bytes:
        raise _unusable(folder, file.name, f"{found} bytes", f"{file.num_bytes} bytes")
    if contents and (sha256 := sha256_of_file(path)) != file.sha256:
        raise _unusable(folder, file.name, f"sha256 {sha256[:12]}", f"sha256 {file.sha256[:12]}")


def _unusable(folder: Path, name: str, found: str, expected: str) -> UnusableCheckpoint:
    return UnusableCheckpoint(
        f"checkpoint {folder}: {name}: found {found}, expected {expected}. It is not loaded. Remove the folder to go "
        "on from the version before, or restore it from a backup."
    )


@asynccontextmanager
async def offering(settings: WeightsSettings, versions: Path) -> AsyncIterator[int | None]:
    """Serve the files for the length of the block, as `settings` say; yield the port, None where nothing is offered.

    Raises ConfigError where the port can't be had.
    """
    if settings.offer is None:
        yield None
        return
    host, _, asked = settings.offer.rpartition(":")
    key = None if settings.api_key is None else settings.api_key.get_secret_value()
    runner = web.AppRunner(_application(versions, key), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host.strip("[]"), int(asked))
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"weights.offer: {settings.offer} can't be listened on ({error}). "
                "Nothing is trained. Stop what uses it, or name another port"
            ) from error
        port = int(runner.addresses[0][1])
        log.info("versions_offered host=%s port=%d", host, port)
        yield port
    finally:
        await runner.cleanup()


def _application(versions: Path, key: str | None) -> web.Application:
    async def file(request: web.Request) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if key is not None and not hmac.compare_digest(shown, f"Bearer {key}".encode()):
            raise web.HTTPUnauthorized(text="the key is missing or wrong; set weights.api_key to the trainer's")
        folder, name = versions / request.match_info["version"], request.match_info["name"]
        manifest = folder / MANIFEST
        if not manifest.is_file() or (
            name != MANIFEST and name not in {file.name for file in files_of(manifest.read_bytes())}
        ):
            raise web.HTTPNotFound(text=f"{request.path}: this trainer does not have it, or not any more")
        return web.FileResponse(folder / name)

    app = web.Application(middlewares=[guard_origin])
    app.add_routes([web.get(r"/versions/{version:v\d{6,18}}/{name:.+}", file)])
    return app
