"""Keys by name: made once, kept as hashes, known to a running gateway, and to everything that it records."""

import asyncio
import json
import logging
import re
import shlex
import stat
import subprocess
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner, Result

from clawstream.cli import app
from clawstream.config import EngineSettings, GatewaySettings, Settings
from clawstream.errors import ConfigError
from clawstream.events import ExchangeCompleted
from clawstream.gateway.access import key_file
from clawstream.gateway.access.key_file import LOOK_EVERY_S, WatchedKeys, add_key, open_door, read_keys, revoke_key
from clawstream.gateway.access.keys import Allowance, Caller, KeyRing, read_ring, shown_key, write_ring
from clawstream.gateway.access.security import Guard
from clawstream.gateway.app import serve
from clawstream.gateway.http.metrics import Metrics
from clawstream.gateway.requests.fields import BadRequest
from tests.fakes.memory_log import MemoryLog
from tests.parts.gateway.running_gateway import QUESTION, running_gateway, until
from tests.sessions import user

NONE = Allowance()


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway looks at its keys all the time; that two seconds are enough, tests with a clock of their own say."""
    monkeypatch.setattr(key_file, "LOOK_EVERY_S", 0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "keys.json"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_opens_for_its_holder_until_it_is_revoked_and_its_name_stays(path: Path) -> None:
    anna, ben = add_key(path, "anna", Allowance(max_concurrent=2)), add_key(path, "ben", NONE)
    assert read_keys(path).holder(anna) == Caller(name="anna", allowance=Allowance(max_concurrent=2))
    assert read_keys(path).holder(ben) == Caller(name="ben")
    revoke_key(path, "anna")
    ring = read_keys(path)
    assert (ring.holder(anna), ring.holder(ben)) == (None, Caller(name="ben"))
    assert [(key.name, key.revoked_at is None) for key in ring.keys] == [("anna", False), ("ben", True)]


def test_a_revoked_name_can_be_given_again_and_the_old_key_stays_shut(path: Path) -> None:
    old = add_key(path, "anna", NONE)
    revoke_key(path, "anna")
    new = add_key(path, "anna", NONE)
    assert (read_keys(path).holder(old), read_keys(path).holder(new)) == (None, Caller(name="anna"))


@pytest.mark.parametrize("name", ["", "default", "two words", "-x", "x" * 65, "a/b", "a\nb", "anna"])
def test_a_name_that_says_nothing_or_two_things_is_refused(path: Path, name: str) -> None:
    add_key(path, "anna", NONE)
    before = path.read_text()
    with pytest.raises(ConfigError, match="nothing was added"):
        add_key(path, name, NONE)
    assert path.read_text() == before


def test_revoking_a_key_that_is_not_there_says_which_are(path: Path) -> None:
    add_key(path, "anna", NONE)
    with pytest.raises(ConfigError, match="There are: anna"):
        revoke_key(path, "ben")


def test_the_file_is_its_owners_alone_and_holds_no_key(path: Path) -> None:
    key = add_key(path, "anna", NONE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text()
    assert key.removeprefix("cs-") not in path.read_text()
    assert len(key) == len("cs-") + 43  # 256 bits


def test_a_write_that_is_cut_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_key(path, "anna", NONE)

    def cut(_ring: KeyRing) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(key_file, "write_ring", cut)
        with pytest.raises(KeyboardInterrupt):
            add_key(path, "ben", NONE)
    assert [key.name for key in read_keys(path).keys] == ["anna"]
    add_key(path, "ben", NONE)


def test_keys_that_are_added_at_once_are_all_there(path: Path) -> None:
    names = [f"key{n}" for n in range(40)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: add_key(path, name, NONE), names))
    assert {key.name for key in read_keys(path).keys} == set(names)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"keys": [{"name": "a"}]}', '{"keys": [{"name": "a", "sha256": "SECRET"}]}', "\x00"]
)
def test_a_file_that_was_damaged_is_said_by_name_and_its_content_is_not(text: str) -> None:
    with pytest.raises(ConfigError, match=r"/x/keys\.json is no file of keys") as error:
        read_ring(text, "/x/keys.json")
    assert "SECRET" not in "".join(traceback.format_exception(error.value))


def test_a_ring_is_read_as_it_was_written(path: Path) -> None:
    add_key(path, "anna", Allowance(max_concurrent=1, requests_per_minute=5))
    add_key(path, "ben", NONE)
    revoke_key(path, "ben")
    assert read_ring(write_ring(read_keys(path)), "x") == read_keys(path)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({"authorization": "Bearer k"}, "k"),
        ({"authorization": "bearer  k "}, "k"),
        ({"x-api-key": "k"}, "k"),
        ({"authorization": "Bearer k", "x-api-key": "other"}, "k"),
        ({"authorization": "Basic k"}, None),
        ({"authorization": "Bearer ", "x-api-key": "k"}, "k"),
        ({"x-api-key": " "}, None),
    ],
)
def test_a_key_is_shown_as_openai_or_as_anthropic_has_it(headers: dict[str, str], key: str | None) -> None:
    assert shown_key(headers) == key


def test_a_running_gateway_looks_again_every_two_seconds_at_most(path: Path) -> None:
    now_s = 100.0
    keys = WatchedKeys(path, now_s=lambda: now_s)
    assert not keys.in_use
    key = add_key(path, "anna", NONE)
    assert keys.ring().holder(key) is None
    now_s += LOOK_EVERY_S
    assert keys.ring().holder(key) == Caller(name="anna")
    revoke_key(path, "anna")
    now_s += LOOK_EVERY_S
    assert keys.ring().holder(key) is None
    assert keys.in_use  # the last one is gone, and the door stays shut


def test_a_file_that_changed_and_kept_its_size_is_read_again(path: Path) -> None:
    now_s = 100.0
    key = add_key(path, "anna", NONE)
    keys, size = WatchedKeys(path, now_s=lambda: now_s), path.stat().st_size
    path.write_text(path.read_text().replace("anna", "nina"))
    now_s += LOOK_EVERY_S
    assert path.stat().st_size == size
    assert keys.ring().holder(key) == Caller(name="nina")


def test_a_file_that_is_damaged_under_way_changes_nothing_and_one_that_is_gone_shuts_the_door(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 100.0
    key = add_key(path, "anna", NONE)
    keys = WatchedKeys(path, now_s=lambda: now_s)
    path.write_text("{")
    now_s += LOOK_EVERY_S
    assert keys.ring().holder(key) == Caller(name="anna")
    assert "keys=unchanged" in caplog.text
    path.unlink()
    now_s += LOOK_EVERY_S
    assert keys.ring().holder(key) is None
    assert keys.in_use


def test_a_file_that_others_can_read_is_warned_of(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_key(path, "anna", NONE)
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        WatchedKeys(path)
    assert "readable_by_others" in caplog.text


async def test_each_exchange_names_the_key_that_asked(tokenizer_folder: Path, path: Path) -> None:
    anna, ben = add_key(path, "anna", NONE), add_key(path, "ben", NONE)
    async with running_gateway(tokenizer_folder, keys_file=path, api_key="the-old-one") as gateway:
        statuses = [
            (await gateway.chat(headers=headers)).status
            for headers in ({}, bearer("cs-wrong"), bearer(anna), {"x-api-key": ben}, bearer("the-old-one"))
        ]
        exchanges = await gateway.recorded(ExchangeCompleted, at_least=3)
        models = [(await gateway.get("/v1/models", headers=headers))[0] for headers in ({}, bearer(anna))]
    assert statuses == [401, 401, 200, 200, 200]
    assert sorted(str(exchange.key_name) for exchange in exchanges) == ["anna", "ben", "default"]
    assert models == [401, 200]


@pytest.mark.usefixtures("looks_often")
async def test_a_revoked_key_is_refused_without_a_restart(tokenizer_folder: Path, path: Path) -> None:
    anna = add_key(path, "anna", NONE)
    async with running_gateway(tokenizer_folder, keys_file=path) as gateway:
        assert (await gateway.chat(headers=bearer(anna))).status == 200
        revoke_key(path, "anna")

        async def refused() -> bool:
            return (await gateway.chat(headers=bearer(anna))).status == 401

        await until(refused)
        assert (await gateway.chat()).status == 401


async def test_the_same_history_under_two_keys_is_two_sessions_also_after_a_restart(
    tokenizer_folder: Path, path: Path
) -> None:
    anna, ben = add_key(path, "anna", NONE), add_key(path, "ben", NONE)
    log = MemoryLog()
    history = [*QUESTION, {"role": "assistant", "content": "It is 4."}, user("Sure?")]
    async with running_gateway(tokenizer_folder, log=log, keys_file=path) as gateway:
        first = await gateway.chat(headers=bearer(anna))
        other = await gateway.chat(history, headers=bearer(ben))
    async with running_gateway(tokenizer_folder, log=log, keys_file=path) as gateway:
        another = await gateway.chat([*history, user("Really?")], headers=bearer(ben))
        again = await gateway.chat(history, headers=bearer(anna))
    sessions = [answer.headers["x-session-id"] for answer in (first, other, another, again)]
    assert sessions[0] == sessions[3]
    assert len({sessions[0], sessions[1]}) == 2
    assert sessions[2] != sessions[0]


async def test_a_session_that_another_key_began_is_refused_also_after_a_restart_and_also_to_end_it(
    tokenizer_folder: Path, path: Path
) -> None:
    anna, ben = add_key(path, "anna", NONE), add_key(path, "ben", NONE)
    log = MemoryLog()
    mine, theirs = bearer(anna) | {"X-Session-Id": "s"}, bearer(ben) | {"X-Session-Id": "s"}
    async with running_gateway(tokenizer_folder, log=log, keys_file=path) as gateway:
        assert (await gateway.chat(headers=mine)).status == 200
        refused = await gateway.chat(headers=theirs)
        ending = await gateway.chat([], headers=theirs, session_done=True)
    async with running_gateway(tokenizer_folder, log=log, keys_file=path) as gateway:
        after_restart = await gateway.chat(headers=theirs)
        still = await gateway.chat(headers=mine)
        exchanges = await gateway.recorded(ExchangeCompleted, at_least=2)
    assert (refused.status, refused.body["error"]["code"]) == (403, "session_of_another_key")
    assert [ending.status, after_restart.status, still.status] == [403, 403, 200]
    assert {exchange.key_name for exchange in exchanges} == {"anna"}


async def test_a_session_from_before_there_were_keys_goes_on_under_the_first_key_that_asks(
    tokenizer_folder: Path, path: Path
) -> None:
    log = MemoryLog()
    named = {"X-Session-Id": "s"}
    async with running_gateway(tokenizer_folder, log=log, keys_file=path) as gateway:
        assert (await gateway.chat(headers=named)).status == 200
    anna, ben = add_key(path, "anna", NONE), add_key(path, "ben", NONE)
    async with running_gateway(tokenizer_folder, log=log, keys_file=path) as gateway:
        statuses = [(await gateway.chat(headers=named | bearer(key))).status for key in (anna, ben, anna)]
    assert statuses == [200, 403, 200]


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "file://", "http://127.0.0.1.evil.example"])
async def test_a_page_of_another_site_may_not_use_a_gateway_without_keys(tokenizer_folder: Path, origin: str) -> None:
    async with running_gateway(tokenizer_folder) as gateway:
        foreign = await gateway.chat(headers={"Origin": origin})
        own = await gateway.chat(headers={"Origin": "http://localhost:5173"})
    assert (foreign.status, foreign.body["error"]["code"], own.status) == (403, "foreign_origin", 200)


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("page", ["/metrics", "/readyz", "/v1/models", "/openapi.json"])
async def test_a_page_that_gave_its_name_this_machine_s_address_reads_nothing_of_a_gateway_without_keys(
    tokenizer_folder: Path, path: Path, page: str
) -> None:
    async with running_gateway(tokenizer_folder, keys_file=path) as gateway:
        for rebound in ({"Host": "evil.example"}, {"Host": "evil.example:8700", "Authorization": "Bearer any"}):
            status, text = await gateway.get(page, headers=rebound)
            assert (status, "foreign_origin" in text) == (403, True)
            assert (await gateway.chat(headers=rebound)).status == 403
        for name in ("localhost:8700", "127.0.0.1", "[::1]:8700", "workstation"):
            assert (await gateway.get(page, headers={"Host": name}))[0] == 200
        key = add_key(path, "anna", NONE)
        named = bearer(key) | {"Host": "llm.example.org"}

        async def let_in() -> bool:
            return (await gateway.get(page, headers=named))[0] == 200

        await until(let_in)


async def test_another_address_needs_a_key_that_is_in_force(tokenizer_folder: Path, path: Path) -> None:
    settings = Settings(
        data_dir=path.parent,
        engine=EngineSettings(urls=("http://127.0.0.1:9",), model_path=tokenizer_folder),
        gateway=GatewaySettings(host="0.0.0.0", port=0, keys_file=path),
    )
    with pytest.raises(ConfigError, match=r"no key of .* is in force"):
        await serve(settings, MemoryLog(), stop=asyncio.Event())
    add_key(path, "anna", NONE)
    stop = asyncio.Event()
    stop.set()
    await serve(settings, MemoryLog(), stop=stop)


def test_the_keys_are_in_the_data_folder_unless_the_settings_say_otherwise(tmp_path: Path) -> None:
    assert Settings(data_dir=tmp_path).keys_file == tmp_path / "keys.json"
    elsewhere = Settings(data_dir=tmp_path, gateway=GatewaySettings(keys_file=tmp_path / "k", api_key=SecretStr("x")))
    assert elsewhere.keys_file == tmp_path / "k"


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    settings = tmp_path / "clawstream.toml"
    settings.write_text(f'environment = false\ndata_dir = "{tmp_path}"\n')
    return lambda *arguments: CliRunner().invoke(app, ["-c", str(settings), "keys", *arguments])


def test_the_first_key_and_the_last_say_before_whom_they_lock_out_and_how_to_go_back(run: Run) -> None:
    first, second = run("add", "anna"), run("add", "ben")
    last_but_one, last = run("revoke", "ben"), run("revoke", "anna")
    assert "the first key: from now on a request without a key gets a 401" in first.stderr
    assert "clawstream keys open" in first.stderr
    assert "first key" not in second.stderr
    assert "last key" not in last_but_one.stderr
    assert "the last key: from now on everybody gets a 401" in last.stderr
    assert "clawstream keys open" in last.stderr
    assert len(first.stdout.splitlines()) == 1


def test_the_door_is_opened_only_when_no_key_is_in_force(run: Run, tmp_path: Path) -> None:
    run("add", "anna")
    refused = run("open")
    assert isinstance(refused.exception, ConfigError)
    assert "keys are in force (anna)" in str(refused.exception)
    run("revoke", "anna")
    assert run("open").exit_code == 0
    assert [key.name for key in read_keys(tmp_path / "keys.json").keys] == ["anna"]


@pytest.mark.parametrize("broken", [b"{", b"\xff\xfe", b'{"keys": [{"name": "a"}]}'])
def test_the_mend_that_the_message_of_a_broken_file_gives_mends_it(tmp_path: Path, broken: bytes) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    path = folder / "keys.json"
    path.write_bytes(broken)
    with pytest.raises(ConfigError) as said:
        add_key(path, "anna", NONE)
    found = re.search(r"(mv .*) && clawstream keys add NAME", str(said.value))
    assert found is not None
    subprocess.run(shlex.split(found[1]), check=True)
    key = add_key(path, "anna", NONE)
    assert read_keys(path).holder(key) == Caller(name="anna")
    assert (folder / "keys.json.broken").read_bytes() == broken


@pytest.mark.slow
async def test_revoking_all_keys_shuts_the_door_and_opening_it_lets_this_machine_in_again(
    tokenizer_folder: Path, path: Path
) -> None:
    anna = add_key(path, "anna", NONE)
    async with running_gateway(tokenizer_folder, keys_file=path) as gateway:

        async def becomes(status: int) -> None:
            async def found() -> bool:
                return (await gateway.chat()).status == status

            await until(found)

        revoke_key(path, "anna")

        async def refused() -> bool:
            return (await gateway.chat(headers=bearer(anna))).status == 401

        await until(refused)
        await becomes(401)
        open_door(path)
        await becomes(200)
        assert (await gateway.chat(headers={"Origin": "http://evil.example"})).status == 403
        add_key(path, "ben", NONE)
        await becomes(401)


def test_an_open_door_is_none_to_the_network(path: Path) -> None:
    add_key(path, "anna", NONE)
    revoke_key(path, "anna")
    open_door(path)
    keys = WatchedKeys(path)
    assert not keys.in_use
    here, everywhere = (
        Guard.of(GatewaySettings(host=host, keys_file=path), keys, Metrics()) for host in ("127.0.0.1", "0.0.0.0")
    )
    assert here.caller({}) == Caller(name=None)
    with pytest.raises(BadRequest, match="No API key"):
        everywhere.caller({})


def test_the_command_shows_a_key_once_on_stdout_and_never_again(run: Run, tmp_path: Path) -> None:
    added = run("add", "anna", "--max-concurrent", "4")
    key = added.stdout.strip()
    as_json = json.loads(run("add", "ben", "--json").stdout)
    twice = run("add", "anna")
    revoked = run("revoke", "anna")
    listed = run("list", "--json")
    assert (added.exit_code, revoked.exit_code) == (0, 0)
    assert isinstance(twice.exception, ConfigError)
    assert key.startswith("cs-")
    assert key not in added.stderr
    assert as_json["name"] == "ben"
    assert read_keys(tmp_path / "keys.json").holder(as_json["key"]) == Caller(name="ben")
    rows = json.loads(listed.stdout)
    assert [(row["name"], row["revoked_at"] is None, row["max_concurrent"]) for row in rows] == [
        ("anna", False, 4),
        ("ben", True, None),
    ]
    assert key not in listed.stdout
    assert "anna" in run("list").stdout


@pytest.mark.parametrize(("shared", "expected"), [(False, ["policy:0:anna", "policy:0:ben"]), (True, ["policy:0"] * 2)])
async def test_a_key_is_answered_from_what_it_has_cached_itself_unless_the_settings_say_otherwise(
    tokenizer_folder: Path, path: Path, shared: bool, expected: list[str]
) -> None:
    keys = [add_key(path, name, NONE) for name in ("anna", "ben")]
    async with running_gateway(tokenizer_folder, keys_file=path, share_prefix_cache=shared) as gateway:
        for key in keys:
            assert (await gateway.chat(headers=bearer(key))).status == 200
        assert [call.request.extra_key for call in gateway.engine.calls] == expected


async def test_without_keys_the_cache_is_everybodys(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder) as gateway:
        await gateway.chat()
        assert [call.request.extra_key for call in gateway.engine.calls] == ["policy:0"]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["/metrics", "/readyz", "/openapi.json"])
async def test_what_tells_of_the_inside_takes_a_key_where_the_gateway_listens_to_the_network(
    tokenizer_folder: Path, path: Path, page: str
) -> None:
    key = add_key(path, "anna", NONE)
    async with running_gateway(tokenizer_folder, host="0.0.0.0", keys_file=path) as gateway:
        shown = [await gateway.get(page, headers=headers) for headers in ({}, bearer("wrong"), bearer(key))]
    async with running_gateway(tokenizer_folder, keys_file=path) as gateway:
        here = await gateway.get(page)
    assert [status for status, _ in (*shown, here)] == [401, 401, 200, 200]
    assert "invalid_request_error" in shown[0][1]


async def test_probes_need_no_key_and_learn_nothing_but_whether_it_serves(tokenizer_folder: Path, path: Path) -> None:
    add_key(path, "anna", NONE)
    async with running_gateway(tokenizer_folder, host="0.0.0.0", keys_file=path) as gateway:
        assert [await gateway.get(page) for page in ("/healthz", "/healthz/ready")] == [
            (200, '{"ok":true}'),
            (200, '{"ready":true}'),
        ]
    async with running_gateway(tokenizer_folder, engine_urls=["http://127.0.0.1:9"]) as gateway:
        assert await gateway.get("/healthz/ready") == (503, '{"ready":false}')
