"""Versions from a trainer on another machine: whole and as published, whatever breaks on the way."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from pydantic import SecretStr, ValidationError

from clawstream.config import WeightsSettings
from clawstream.errors import ConfigError, TryLater
from clawstream.events import PolicyPublished
from clawstream.inference.model_folder import MANIFEST, files_of
from clawstream.training.checkpoints import offering
from clawstream.weights.fetching import Fetcher
from tests.unit.monitoring.said import published
from tests.unit.weights.engines import PolicyTopic, Watched, Weights, keeping

CONTENT = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 4000, "trainer/optimizer.safetensors": b"x"}
ANY_PORT = WeightsSettings(offer="127.0.0.1:0")


def write(root: Path, version: int, content: dict[str, bytes] = CONTENT) -> PolicyPublished:
    """A version as the trainer leaves it, and what the log says of it."""
    folder = root / f"v{version:06d}"
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    files = [
        {"name": name, "num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in content.items()
    ]
    manifest = json.dumps({"files": files}).encode()
    (folder / MANIFEST).write_bytes(manifest)
    return replace(published(version, str(folder)), manifest_sha256=hashlib.sha256(manifest).hexdigest())


@asynccontextmanager
async def fetching(
    theirs: Path,
    ours: Path,
    *,
    offer: WeightsSettings = ANY_PORT,
    key: str | None = None,
    base: Path = Path("/base"),
    kind: type[Fetcher] = Fetcher,
) -> AsyncIterator[Fetcher]:
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(offering(offer, theirs))
        wanted = WeightsSettings(url=f"http://127.0.0.1:{port}", api_key=None if key is None else SecretStr(key))
        fetcher = await stack.enter_async_context(kind.open(wanted, ours, base))
        assert fetcher is not None
        yield fetcher


def place(folder: Path, version: PolicyPublished) -> Path:
    assert version.manifest_sha256 is not None
    return folder / f"v{version.policy_version:06d}-{version.manifest_sha256[:12]}"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_version_is_brought_whole_but_for_what_only_its_trainer_needs(tmp_path: Path) -> None:
    version = write(tmp_path / "theirs", 7)
    async with fetching(tmp_path / "theirs", tmp_path / "ours") as fetcher:
        assert fetcher.here(version) is None
        await fetcher.bring(version)
        found = fetcher.here(version)
    assert found == replace(version, path=str(place(tmp_path / "ours", version)))
    wanted = {name: data for name, data in contents(Path(version.path)).items() if not name.startswith("trainer/")}
    assert contents(Path(found.path)) == wanted


async def test_an_engine_takes_over_what_lies_on_another_machine_and_its_own_base(
    tmp_path: Path, weights: Weights
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    elsewhere = replace(weights(0), path="/on/the/other/machine", manifest_sha256=None)
    log, fake = PolicyTopic(elsewhere), Loading("http://e", "0", asyncio.Event())
    async with (
        fetching(tmp_path / "theirs", tmp_path / "ours", base=base) as fetcher,
        keeping(log, clients=[fake], fetcher=fetcher),
    ):
        await log.until(lambda: log.active() == [("http://e", 0)])
        first = write(tmp_path / "theirs", 1, {"config.json": b"{}"})
        await log.append([first])
        await log.until(lambda: ("http://e", 1) in log.active())
    assert fake.paths == [str(base), str(place(tmp_path / "ours", first))]


class Loading(Watched):
    """Keeps the folders that it was shown."""

    paths: list[str]

    async def update_weights(self, path: str, version: str, *, flush_cache: bool = False) -> None:
        self.paths = [*getattr(self, "paths", []), path]
        await super().update_weights(path, version, flush_cache=flush_cache)


@pytest.mark.parametrize("name", ["model.safetensors", MANIFEST])
async def test_bytes_that_are_not_those_of_the_log_are_never_shown_to_an_engine(tmp_path: Path, name: str) -> None:
    version = write(tmp_path / "theirs", 7)
    file = Path(version.path) / name
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"\x01", b"\x02") if name != MANIFEST else whole + b" ")
    async with fetching(tmp_path / "theirs", tmp_path / "ours") as fetcher:
        with pytest.raises(TryLater, match=r"expected|the log says"):
            await fetcher.bring(version)
        assert fetcher.here(version) is None
        file.write_bytes(whole)
        await fetcher.bring(version)
        assert fetcher.here(version) is not None


@pytest.mark.parametrize("cut_at", [0, 1, 500_000, 1_023_999])
async def test_a_broken_connection_goes_on_where_it_broke(tmp_path: Path, cut_at: int) -> None:
    version = write(tmp_path / "theirs", 7)
    begun = tmp_path / "ours" / f".fetching-{place(tmp_path, version).name}" / "model.safetensors"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(CONTENT["model.safetensors"][:cut_at])
    asked: list[tuple[str, str | None]] = []

    @web.middleware
    async def listening(request: web.Request, handler: object) -> web.StreamResponse:
        asked.append((request.path.rpartition("/")[2], request.headers.get("Range")))
        return await handler(request)  # type: ignore[operator,no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        application = web.Application
        patch.setattr(web, "Application", lambda *, middlewares=(): application(middlewares=[listening, *middlewares]))
        async with fetching(tmp_path / "theirs", tmp_path / "ours") as fetcher:
            await fetcher.bring(version)
    assert ("model.safetensors", f"bytes={cut_at}-" if cut_at else None) in asked
    assert (place(tmp_path / "ours", version) / "model.safetensors").read_bytes() == CONTENT["model.safetensors"]


async def test_only_versions_that_are_named_are_kept_and_nothing_that_is_not_ours_is_touched(tmp_path: Path) -> None:
    versions = [write(tmp_path / "theirs", number) for number in range(1, 5)]
    async with fetching(tmp_path / "theirs", tmp_path / "ours") as fetcher:
        for version in versions:
            await fetcher.bring(version)
        (tmp_path / "ours" / ".DS_Store").touch()
        (tmp_path / "ours" / f".fetching-{place(tmp_path, versions[0]).name}").mkdir()
        fetcher.make_room([versions[1], versions[3]])
    kept = sorted(path.name for path in (tmp_path / "ours").iterdir() if path.name != ".lock")
    assert kept == [".DS_Store", place(tmp_path, versions[1]).name, place(tmp_path, versions[3]).name]


async def test_a_version_of_an_earlier_policy_is_not_taken_for_the_one_of_its_number(tmp_path: Path) -> None:
    earlier = write(tmp_path / "theirs", 1)
    async with fetching(tmp_path / "theirs", tmp_path / "ours") as fetcher:
        await fetcher.bring(earlier)
        version = write(tmp_path / "theirs", 1, CONTENT | {"model.safetensors": b"another policy"})
        assert fetcher.here(version) is None
        await fetcher.bring(version)
    assert (place(tmp_path / "ours", version) / "model.safetensors").read_bytes() == b"another policy"


async def test_where_publishing_is_faster_than_the_line_engines_still_get_newer_versions(
    tmp_path: Path, weights: Weights
) -> None:
    base = replace(weights(0), manifest_sha256=None)
    log, fake = PolicyTopic(base), Loading("http://e", "0", asyncio.Event())

    class Slow(Fetcher):
        async def bring(self, version: PolicyPublished) -> None:
            await super().bring(version)
            await log.append([write(tmp_path / "theirs", version.policy_version + 1, {"config.json": b"{}"})])

    async with (
        fetching(tmp_path / "theirs", tmp_path / "ours", base=Path(base.path), kind=Slow) as fetcher,
        keeping(log, clients=[fake], fetcher=fetcher),
    ):
        await log.append([write(tmp_path / "theirs", 1, {"config.json": b"{}"})])
        await log.until(lambda: len(log.active()) > 5)
    versions = [version for _, version in log.active()]
    assert versions == sorted(versions)


async def test_an_engine_that_comes_back_gets_the_newest_that_is_here_while_a_newer_one_can_not_be_had(
    tmp_path: Path, weights: Weights
) -> None:
    base = replace(weights(0), manifest_sha256=None)
    first = write(tmp_path / "theirs", 1, {"config.json": b"{}"})
    log, fake = PolicyTopic(base, first), Loading("http://e", "0", asyncio.Event())
    async with (
        fetching(tmp_path / "theirs", tmp_path / "ours", base=Path(base.path)) as fetcher,
        keeping(log, clients=[fake], fetcher=fetcher),
    ):
        await log.until(lambda: ("http://e", 1) in log.active())
        await log.append([replace(published(2, "/gone"), manifest_sha256="0" * 64)])
        fake.serves = "0"
        await log.until(lambda: log.active()[-2:] == [("http://e", 1)] * 2)
        fake.told.clear()
        third = write(tmp_path / "theirs", 3, {"config.json": b"{}"})
        await log.append([third])
        await log.until(lambda: ("http://e", 3) in log.active())
    assert fake.told == ["pause", "update 3", "resume"], "a trainer that is away says nothing of the engine"


async def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    version = write(tmp_path / "theirs", 1)
    (tmp_path / "ours").write_text("a file stands where the folder would be written")
    async with offering(ANY_PORT, tmp_path / "theirs") as port, aiohttp.ClientSession() as session:
        with pytest.raises(TryLater, match="can't be written"):
            await Fetcher(session, f"http://127.0.0.1:{port}", tmp_path / "ours", tmp_path).bring(version)


async def test_a_trainer_that_is_away_or_has_it_no_more_is_asked_again_later(tmp_path: Path) -> None:
    version = replace(published(3, "/gone"), manifest_sha256="0" * 64)
    async with fetching(tmp_path / "theirs", tmp_path / "ours") as fetcher:
        with pytest.raises(TryLater, match="404"):
            await fetcher.bring(version)
    with pytest.raises(TryLater, match="What is served stays"):
        async with aiohttp.ClientSession() as session:
            await Fetcher(session, "http://127.0.0.1:9", tmp_path, tmp_path).bring(version)


@pytest.mark.parametrize("shown", [None, "another"])
async def test_nothing_is_given_to_whoever_does_not_show_the_key(tmp_path: Path, shown: str | None) -> None:
    version = write(tmp_path / "theirs", 7)
    offer = WeightsSettings(offer="127.0.0.1:0", api_key=SecretStr("secret"))
    async with fetching(tmp_path / "theirs", tmp_path / "ours", offer=offer, key=shown) as fetcher:
        with pytest.raises(TryLater, match="401"):
            await fetcher.bring(version)
    async with fetching(tmp_path / "theirs", tmp_path / "ours", offer=offer, key="secret") as fetcher:
        await fetcher.bring(version)


@pytest.mark.parametrize("path", ["v000007/state.json", "v000007/../secret", "v000007/%2e%2e/secret", "secret"])
async def test_nothing_but_the_files_of_versions_can_be_asked_for(tmp_path: Path, path: str) -> None:
    write(tmp_path / "theirs", 7)
    for place in ("theirs/secret", "theirs/v000007/state.json"):
        (tmp_path / place).write_text("secret")
    async with offering(ANY_PORT, tmp_path / "theirs") as port:
        _, writer = connection = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /versions/{path} HTTP/1.1\r\nHost: e\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(10):
            answer = await connection[0].read()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"\r\nsecret" not in answer


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "..", "", "a\\..\\x"])
def test_a_manifest_that_names_a_file_elsewhere_is_none(name: str) -> None:
    manifest = json.dumps({"files": [{"name": name, "num_bytes": 1, "sha256": "0"}]}).encode()
    with pytest.raises(ValueError, match="not inside"):
        files_of(manifest)


async def test_a_port_that_is_taken_is_said_before_anything_is_trained(tmp_path: Path) -> None:
    async with offering(ANY_PORT, tmp_path) as port:
        with pytest.raises(ConfigError, match="Stop what uses it"):
            async with offering(WeightsSettings(offer=f"127.0.0.1:{port}"), tmp_path):
                pass


@pytest.mark.parametrize(
    "said",
    [
        {"url": "gpu:30067"},
        {"url": "http://gpu:1", "offer": "127.0.0.1:2"},
        {"offer": "30067"},
        {"api_key": "change-me"},
    ],
    ids=str,
)
def test_settings_that_can_not_work_are_refused(said: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        WeightsSettings.model_validate(said)


def test_an_offer_to_other_machines_needs_a_key() -> None:
    with pytest.raises(ValidationError, match=r"set weights\.api_key"):
        WeightsSettings(offer="0.0.0.0:30067")
