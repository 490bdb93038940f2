"""Versions of a policy as folders, each whole or not there at all, and offered to engines on other machines.

A folder is written beside its place, the manifest last, and renamed once every file is on disk. So a folder whose
manifest agrees with its files is complete; any other is refused or skipped.

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
from contextlib import asynccontextmanager, contextmanager
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
    File,
    files_of,
    put_whole,
    remove_whole,
    sha256_of_file,
    version_name,
)
from clawstream.locks import locked

log = logging.getLogger(__name__)

FORMAT = 1
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
    """Let `save` fill a folder, then put it whole in its place; a broken folder of the same version is replaced."""
    root.mkdir(parents=True, exist_ok=True)
    target = root / version_name(plan.policy_version)
    writing = root / f".writing-{target.name}"
    if writing.exists():
        shutil.rmtree(writing)
    writing.mkdir()
    save(writing)
    files = tuple(
        File(name=p.relative_to(writing).as_posix(), num_bytes=p.stat().st_size, sha256=sha256_of_file(p))
        for p in sorted(writing.rglob("*"))
        if p.is_file()
    )
    (writing / MANIFEST).write_bytes(_manifest(plan, step, files))
    put_whole(writing, target)
    return read(target, contents=False)


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


def latest(root: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint; incomplete ones are skipped and logged. None: there is none."""
    for version in sorted(_versions(root), reverse=True):
        try:
            return read(root / version_name(version))
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
