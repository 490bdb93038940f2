"""Whose a session is: the key's that was first answered in it, whatever was asked since, for ever."""

import asyncio
import sqlite3
import stat
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.errors import PartUnavailable, TryLater
from clawstream.events import ExchangeCompleted, ExchangeFailed, FeedbackGiven
from clawstream.gateway.access.key_file import add_key
from clawstream.gateway.access.keys import Allowance
from clawstream.gateway.access.owners import Owners, SessionClaim, hashed
from clawstream.gateway.http.connection import Bounds
from clawstream.stream.log import Raw, Start
from clawstream.stream.stage import Record
from clawstream.stream.topics import FEEDBACK
from tests.examples import examples
from tests.fakes.memory_log import MemoryLog
from tests.fakes.scripted_engine import Fault
from tests.parts.gateway.access.test_keys import bearer
from tests.parts.gateway.running_gateway import running_gateway, until
from tests.sessions import Session, user

HOUR_MS = 3_600_000
NOW_MS = 10 * HOUR_MS
HELLO = [user("hello")]


def opened(folder: Path) -> AbstractContextManager[Owners]:
    return closing(Owners(folder / "sessions.sqlite", lambda: NOW_MS))


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[Owners]:
    with opened(tmp_path) as found:
        found.whole = True
        yield found


def exchange(session_id: str, key: str | None, at_ms: int = 0) -> ExchangeCompleted:
    return replace(Session(session_id).ask(HELLO, "hi"), key_name=key, finished_at_ms=at_ms)


def failure(session_id: str, key: str | None, *output_ids: int) -> ExchangeFailed:
    return replace(Session(session_id).fail(HELLO), key_name=key, output_ids=output_ids)


def test_who_was_answered_owns_the_session_and_who_asked_in_vain_does_not(owners: Owners) -> None:
    owners.learn([exchange("s", "anna"), failure("cut", "anna", 5), failure("refused", "anna"), exchange("open", None)])
    assert [owners.owner_of(session) for session in ("s", "cut", "refused", "open")] == ["anna", "anna", None, None]
    assert [owners.is_open_to("s", key) for key in ("anna", "ben", None)] == [True, False, False]
    assert owners.is_open_to("refused", "ben")


@examples(0.2)
@given(at_ms=st.permutations([1, 2, 3, 4]), cut=st.integers(0, 4))
def test_the_first_who_was_answered_is_the_owner_in_whatever_order_it_is_learned(
    tmp_path_factory: pytest.TempPathFactory, at_ms: list[int], cut: int
) -> None:
    folder = tmp_path_factory.mktemp("owners")
    told = [exchange("s", f"key{at}", at) for at in at_ms]
    with opened(folder) as before:
        before.learn(told[:cut])
    with opened(folder) as after:
        after.whole = True
        after.learn(told[cut:])
    with opened(folder) as again:
        again.whole = True
        assert again.owner_of("s") == "key1"


@pytest.fixture
async def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator["Kept", None]:
    monkeypatch.setattr("clawstream.gateway.access.owners.KEEP_EVERY_S", 0.01)
    with opened(tmp_path) as owners, closing(sqlite3.connect(tmp_path / "sessions.sqlite")) as file:
        owners.whole = True
        keeping = asyncio.create_task(owners.run())
        yield Kept(owners, file)
        keeping.cancel()


class Kept(NamedTuple):
    """Owners that are kept at once, and their file."""

    owners: Owners
    file: sqlite3.Connection

    async def learn(self, *events: ExchangeCompleted) -> None:
        """Return once what is to be kept of these is."""
        barrier = exchange(str(uuid4()), "anna")
        self.owners.learn([*events, barrier])

        async def there() -> bool:
            query = "SELECT 1 FROM owners WHERE session = ?"
            return self.file.execute(query, (hashed(barrier.session_id),)).fetchone() is not None

        await until(there)

    def owner_of(self, session_id: str) -> str | None:
        query = "SELECT name FROM owners JOIN keys ON id = key_id WHERE session = ?"
        found = self.file.execute(query, (hashed(session_id),)).fetchone()
        return None if found is None else bytes(found[0]).decode()


async def test_an_answer_that_is_learned_late_makes_its_key_the_owner_if_it_was_the_first(kept: Kept) -> None:
    told = []
    for key, at_ms in (("ben", 5), ("ben", 7), ("anna", 6), ("anna", 3), ("ben", 4)):
        await kept.learn(exchange("s", key, at_ms))
        told.append((kept.owner_of("s"), kept.owners.owner_of("s")))
    assert told == [("ben", "ben")] * 3 + [("anna", "anna")] * 2


async def test_what_is_kept_of_a_session_is_not_written_again_with_each_answer(kept: Kept) -> None:
    await kept.learn(exchange("s", "anna", 5))
    kept.file.execute("DELETE FROM owners WHERE session = ?", (hashed("s"),))
    kept.file.commit()
    await kept.learn(exchange("s", "anna", 6))
    assert kept.owner_of("s") is None
    await kept.learn(exchange("s", "anna", 4))
    assert kept.owner_of("s") == "anna"


async def test_no_number_of_others_washes_an_owner_out(owners: Owners, tmp_path: Path) -> None:
    await owners.take(SessionClaim(hashed(f"s{number}"), f"key{number % 5}", 0) for number in range(20_000))
    assert [owners.owner_of(f"s{number}") for number in (0, 19_999)] == ["key0", "key4"]
    assert (tmp_path / "sessions.sqlite").stat().st_size < 2**21


def test_the_file_says_how_far_it_has_the_log_once_all_of_it_was_read(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        assert first.read_to_ms is None
    with opened(tmp_path) as second:
        assert second.read_to_ms is None
        second.whole = True
    with opened(tmp_path) as third:
        assert third.read_to_ms == NOW_MS - HOUR_MS
    assert stat.S_IMODE((tmp_path / "sessions.sqlite").stat().st_mode) == 0o600


def test_until_the_log_is_read_an_unknown_session_is_no_keys_to_go_on_with(tmp_path: Path) -> None:
    with opened(tmp_path) as owners:
        owners.learn([exchange("s", "anna")])
        assert [owners.is_open_to("s", key) for key in ("anna", "ben")] == [True, False]
        assert owners.is_open_to("other", None)
        with pytest.raises(TryLater, match="still being read"):
            owners.is_open_to("other", "ben")


@pytest.mark.parametrize(("damage", "behind"), [(b"no database" * 100, False), (b"", False), (b"?" * 4096, True)])
async def test_a_file_that_was_damaged_is_rebuilt_from_the_log(tmp_path: Path, damage: bytes, behind: bool) -> None:
    with opened(tmp_path) as owners:
        await owners.take(SessionClaim(hashed(f"s{number}"), "anna", 0) for number in range(1000))
        owners.whole = True
    file = tmp_path / "sessions.sqlite"
    written = file.read_bytes()
    assert len(written) > 3 * 4096
    file.write_bytes(written[: 2 * 4096] + damage + written[2 * 4096 + len(damage) :] if behind else damage)
    with opened(tmp_path) as owners:
        assert owners.read_to_ms is None
        with pytest.raises(TryLater):
            owners.owner_of("s")


def test_a_folder_that_can_not_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "owners").write_text("a file")
    with pytest.raises(PartUnavailable, match="set data_dir"), opened(tmp_path / "owners"):
        pass


def test_a_session_is_held_while_one_is_under_way_and_no_longer(owners: Owners) -> None:
    with owners.holding("s", "anna"), owners.holding("s", "anna"):
        assert [owners.is_open_to("s", key) for key in ("anna", "ben", None)] == [True, False, False]
    assert owners.is_open_to("s", "ben")


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "keys.json"
    added = {name: bearer(add_key(path, name, Allowance())) | {"X-Session-Id": "s"} for name in ("anna", "ben")}
    return {"keys_file": path, **added}


async def test_an_owner_is_one_after_the_window_and_after_a_restart(
    tokenizer_folder: Path, keys: dict[str, Any]
) -> None:
    log, anna, ben = MemoryLog(), keys["anna"], keys["ben"]
    house_of = {"log": log, "keys_file": keys["keys_file"], "bounds": Bounds(index_window_s=0)}
    async with running_gateway(tokenizer_folder, **house_of) as gateway:
        first = await gateway.chat(headers=anna)
        await gateway.chat(headers=anna | {"X-Session-Id": "later"})  # whereupon the first is out of the window
        refused = [(await gateway.chat(headers=ben)).status]
    async with running_gateway(tokenizer_folder, **house_of) as gateway:
        thumb = {"response_id": first.body["id"], "session_id": "s", "thumb": "down"}
        async with gateway.client.post(f"{gateway.url}/v1/feedback", json=thumb, headers=ben) as answer:
            refused.append(answer.status)
        refused += [
            (await gateway.chat(headers=ben)).status,
            (await gateway.chat([], session_done=True, headers=ben)).status,
        ]
        own = await gateway.chat(headers=anna)
        async with gateway.client.post(f"{gateway.url}/v1/feedback", json=thumb, headers=anna) as answer:
            counted = answer.status
        batches = log.follow((FEEDBACK,), until_end=True)
        told = [record.event async for records in batches for record in records if isinstance(record, Record)]
    assert (refused, own.status, counted) == ([403, 404, 403, 403], 200, 201)
    assert [event.key_name for event in told if isinstance(event, FeedbackGiven)] == ["anna"]


@pytest.mark.slow
async def test_a_data_folder_keeps_the_owners_of_each_brokers_log_apart(
    tokenizer_folder: Path, keys: dict[str, Any], tmp_path: Path
) -> None:
    here, there = MemoryLog(), MemoryLog()
    told = []
    for log, key in ((here, "anna"), (there, "ben"), (here, "ben"), (there, "anna"), (here, "anna")):
        async with running_gateway(
            tokenizer_folder, log=log, data_dir=tmp_path, keys_file=keys["keys_file"]
        ) as gateway:
            told.append((await gateway.chat(headers=keys[key])).status)
    assert told == [200, 200, 403, 403, 200]
    assert len(list((tmp_path / "owners").glob("*.sqlite"))) == 2


async def test_a_request_that_was_refused_takes_no_session(tokenizer_folder: Path, keys: dict[str, Any]) -> None:
    anna, ben = keys["anna"], keys["ben"]
    async with running_gateway(tokenizer_folder, keys_file=keys["keys_file"]) as gateway:
        asked = [
            await gateway.chat(headers=ben, chat_template_kwargs={"no_such": 1}),
            await gateway.chat([user("x" * 5000)], headers=ben),
            await gateway.chat(headers=ben, min_tokens=2000, max_tokens=1),
            await gateway.chat([], headers=ben, session_done=True),
        ]
        answered = await gateway.chat(headers=anna)
        late = await gateway.chat(headers=ben)
    assert [one.status for one in asked] == [400, 400, 400, 200]
    assert (answered.status, late.status) == (200, 403)


async def test_two_keys_that_begin_one_session_at_once_do_not_share_it(
    tokenizer_folder: Path, keys: dict[str, Any]
) -> None:
    anna, ben = keys["anna"], keys["ben"]
    async with running_gateway(tokenizer_folder, keys_file=keys["keys_file"]) as gateway:
        gateway.engine.hold()
        under_way = asyncio.create_task(gateway.chat(headers=ben))
        await until(gateway.generating)
        meanwhile = await gateway.chat(headers=anna)
        under_way.cancel()
        with suppress(asyncio.CancelledError):
            await under_way
        await gateway.recorded(ExchangeFailed)
        gateway.engine.release()

        async def answered() -> bool:  # once the one that was left is over
            return (await gateway.chat(headers=anna)).status == 200

        await until(answered)
        late = await gateway.chat(headers=ben)
    assert (meanwhile.status, late.status) == (403, 403)


async def test_who_got_a_part_of_an_answer_owns_the_session(tokenizer_folder: Path, keys: dict[str, Any]) -> None:
    async with running_gateway(tokenizer_folder, keys_file=keys["keys_file"]) as gateway:
        gateway.engine.faults.append(Fault(cut_after_tokens=3))
        await gateway.chat(headers=keys["anna"], stream=True)
        [failed] = await gateway.recorded(ExchangeFailed)
        statuses = [(await gateway.chat(headers=keys[name])).status for name in ("ben", "anna")]
    assert (len(failed.output_ids) > 0, statuses) == (True, [403, 200])


async def test_an_owner_that_a_killed_gateway_had_no_time_to_keep_is_read_from_the_log(
    tokenizer_folder: Path, keys: dict[str, Any], tmp_path: Path
) -> None:
    log = MemoryLog()
    house_of: dict[str, Any] = {"log": log, "data_dir": tmp_path, "keys_file": keys["keys_file"]}
    async with running_gateway(tokenizer_folder, **house_of):
        pass  # its file has all of the log up to here
    await log.append([exchange("s", "anna")])
    async with running_gateway(tokenizer_folder, **house_of) as gateway:
        statuses = [(await gateway.chat(headers=keys[name])).status for name in ("ben", "anna")]
    assert statuses == [403, 200]


class Unread(MemoryLog):
    """A log that is slow to be read from its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.readable = asyncio.Event()

    async def follow_raw(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncGenerator[Sequence[Raw], None]:
        """Yield the bytes once they can be read."""
        await self.readable.wait()
        async for raws in super().follow_raw(topics, start, until_end=until_end):
            yield raws


async def test_while_owners_are_read_from_the_log_only_sessions_that_may_be_anothers_wait(
    tokenizer_folder: Path, keys: dict[str, Any]
) -> None:
    log, anna, ben = Unread(), keys["anna"], keys["ben"]
    await log.append([exchange("s", "anna")])
    house_of = {"log": log, "keys_file": keys["keys_file"], "bounds": Bounds(index_window_s=0)}
    async with running_gateway(tokenizer_folder, **house_of) as gateway:
        waiting = [await gateway.chat(headers=ben), await gateway.chat(headers=anna)]
        unnamed = await gateway.chat(headers={"Authorization": ben["Authorization"]})
        log.readable.set()

        async def known() -> bool:
            return (await gateway.chat(headers=anna)).status == 200

        await until(known)
        refused = await gateway.chat(headers=ben)
    assert [(one.status, one.headers["retry-after"]) for one in waiting] == [(503, "2"), (503, "2")]
    assert "the log is still being read" in waiting[0].body["error"]["message"]
    assert (unnamed.status, refused.status) == (200, 403)
