"""What a person can look up and rule about, and the command line over a real broker."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from clawstream.errors import OperatorError
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Fate
from clawstream.stream.quarantine import dead_letters, plain, rule, shown
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.stream.raw import append_bytes
from tests.unit.stream import queues, toys


@pytest.fixture
async def log() -> MemoryLog:
    """A log on which session a waits behind its second record, and b goes on."""
    log = MemoryLog(MemoryBroker(partitions=1))
    await log.append([toys.done(session, number) for number in range(3) for session in "ab"])
    async with toys.running(queues.chain({("a", 1)}), log):
        await toys.settled(log, "chain")
    return log


HEAD, PARKED = "chain/clawstream.exchanges.v1/0/2", "chain/clawstream.exchanges.v1/0/4"


async def test_a_dead_letter_says_what_it_is_of_and_why(log: MemoryLog) -> None:
    head, parked = [plain(dead_letter) for dead_letter in await dead_letters(log)]
    assert (head["dead_letter"], head["key"], head["reason"], head["fate"]) == (HEAD, "a", "unusable", "open")
    assert (parked["dead_letter"], parked["reason"]) == (PARKED, "parked")
    assert head["error"] == "UnusableEvent: bad"


async def test_showing_one_gives_its_event_its_headers_and_its_bytes(log: MemoryLog) -> None:
    found = await shown(log, HEAD)
    assert found["headers"]["ce_id"] == toys.done("a", 1).event_id
    assert found["event"] == repr(toys.done("a", 1))
    [original] = [raw for raw in log.broker.records(queues.PLACE) if raw.offset == 2]
    assert bytes.fromhex(found["value_hex"]) == original.value


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("chain", "names no dead letter"),
        ("chain/clawstream.exchanges.v1/0/x", "names no dead letter"),
        ("chain/clawstream.exchanges.v1/0/3", "no queue holds"),
        (PARKED, f"waits behind {HEAD}: rule about that one"),
    ],
)
async def test_what_can_not_be_ruled_about_is_refused(log: MemoryLog, name: str, why: str) -> None:
    with pytest.raises(OperatorError, match=why):
        await rule(log, Fate.REPLAY, dead_letter=name, stage=None, because=None)


async def test_one_dead_letter_or_one_stage_is_to_be_named(log: MemoryLog) -> None:
    for dead_letter, stage in ((None, None), (HEAD, "chain")):
        with pytest.raises(OperatorError, match="name one dead letter, or all of a stage"):
            await rule(log, Fate.REPLAY, dead_letter=dead_letter, stage=stage, because=None)


async def test_a_discard_needs_a_reason_and_the_queue_keeps_it(log: MemoryLog) -> None:
    with pytest.raises(OperatorError, match="a reason is needed"):
        await rule(log, Fate.DISCARD, dead_letter=HEAD, stage=None, because=" ")
    await rule(log, Fate.DISCARD, dead_letter=HEAD, stage=None, because="noise of a test")
    async with toys.running(queues.chain({("a", 1)}), log):
        await toys.until(queues.closed(log))
    head, parked = [plain(dead_letter) for dead_letter in await dead_letters(log)]
    assert (head["fate"], head["because"]) == ("discarded", "noise of a test")
    assert head["ruled_at"] is not None
    assert (parked["fate"], parked["because"]) == ("replayed", None)


async def test_what_is_ruled_about_is_not_ruled_about_again(log: MemoryLog) -> None:
    [ruled] = await rule(log, Fate.REPLAY, dead_letter=None, stage="chain", because=None)
    assert ruled.fate is Fate.REPLAY
    assert await rule(log, Fate.REPLAY, dead_letter=None, stage="chain", because=None) == []
    with pytest.raises(OperatorError, match="ruled about already: replay"):
        await rule(log, Fate.DISCARD, dead_letter=HEAD, stage=None, because="no")


async def command(settings: Path, *argv: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "clawstream", "--config", str(settings), "dlq", *argv,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), said.decode()


@pytest.mark.slow
async def test_the_commands_replay_and_discard_on_a_real_broker(
    kafka_bootstrap: str, topic_prefix: str, tmp_path: Path
) -> None:
    settings = tmp_path / "clawstream.toml"
    settings.write_text(f'[kafka]\nbootstrap = "{kafka_bootstrap}"\nprefix = "{topic_prefix}"\n')
    await admin.apply(kafka_bootstrap, topic_prefix)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix, client_id="test") as log:
        await log.append([toys.done(session, number) for number in range(3) for session in "ab"])
        await append_bytes(log, toys.EXCHANGES, b"b", b"nonsense", [])
        await log.append([toys.done("b", 3)])
        bad = {("a", 1)}
        async with toys.running(queues.chain(bad), log):
            await toys.settled(log, "chain")
            code, out, _ = await command(settings, "list", "--json")
            assert code == 0
            listed = json.loads(out)
            assert {(one["key"], one["reason"]) for one in listed} == {
                ("a", "unusable"), ("a", "parked"), ("b", "undecodable"), ("b", "parked"),
            }  # fmt: skip
            unreadable = next(one["dead_letter"] for one in listed if one["reason"] == "undecodable")
            unusable = next(one["dead_letter"] for one in listed if one["reason"] == "unusable")
            code, out, _ = await command(settings, "show", unreadable, "--json")
            assert bytes.fromhex(json.loads(out)["value_hex"]) == b"nonsense"
            code, _, said = await command(settings, "discard", unreadable)
            assert code != 0, said  # nobody there to give a reason
            assert (await command(settings, "discard", unreadable, "--reason", "noise"))[0] == 0
            bad.clear()
            code, _, said = await command(settings, "replay", unusable)
            assert (code, "1 to replay: chain" in said) == (0, True)
            await toys.until(queues.closed(log))
            code, _, said = await command(settings, "replay", unusable)
            assert (code, "ruled about already: replayed" in said) == (2, True)
        code, out, _ = await command(settings, "list", "--all", "--json")
        assert {(one["reason"], one["fate"], one["because"]) for one in json.loads(out)} == {
            ("unusable", "replayed", None),
            ("parked", "replayed", None),
            ("undecodable", "discarded", "noise"),
        }
        assert await queues.chained(log) == {"a": [0, 1], "b": [0, 1, 2]}
