"""What there is to see after a run: read from the broker, the database, the disk and the audit."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psycopg
from aiokafka import AIOKafkaConsumer
from psycopg import sql
from sqlalchemy.engine import make_url

from clawstream.config import inherited_environment
from clawstream.events import BatchPlanned
from clawstream.projections.write.chain import BLOCK_OFFSETS, MARK_BYTES
from clawstream.projections.write.progress import blocks_of
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.stage import Record
from clawstream.stream.topics import EXCHANGES, HINTS, POLICY, SAMPLES, TURNS, VERDICTS, VOTES
from clawstream.training.checkpoints import read
from tests.chaos.oracle import TABLES, Moved

TOPICS = (
    EXCHANGES, TURNS, VOTES, VERDICTS,
    HINTS, SAMPLES, POLICY,
)  # fmt: skip
GROUPS = ("turns", "judging", "samples", "project")
_COMMITS = "__consumer_offsets"
_NEWEST_COMMIT_KEY = 1  # versions above are of a group's members
_AUDIT_WITHIN_S = 300.0


async def everything(log: KafkaLog, topics: Sequence[str] = TOPICS) -> tuple[list[Record], list[str]]:
    """Return every record of the topics, and what can't be read, each partition in order."""
    records: list[Record] = []
    bad: list[str] = []
    async for found in log.follow(topics, until_end=True):
        for one in found:
            if isinstance(one, Record):
                records.append(one)
            else:
                bad.append(f"{one.topic}-{one.partition} offset {one.offset}: {one.reason}")
    return records, bad


async def moved(bootstrap: str, groups: Container[str] = GROUPS) -> list[Moved]:
    """Return every commit of these groups that took an offset back, by the broker's own log of commits."""
    consumer = AIOKafkaConsumer(
        _COMMITS, bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        ends = await consumer.end_offsets(consumer.assignment())
        newest: dict[_Committed, int] = {}
        back: list[Moved] = []
        for place, end in ends.items():
            while await consumer.position(place) < end:
                for record in (await consumer.getmany(place, timeout_ms=500)).get(place, ()):
                    commit = _commit_of(record.key, record.value)
                    if commit is None or commit[0].group not in groups:
                        continue
                    where, offset = commit
                    if offset < newest.get(where, 0):
                        back.append(Moved(**where._asdict(), was=newest[where], found=offset))
                    newest[where] = offset
        assert newest, f"{_COMMITS} has no commit of a stage: what it holds is not what is looked for here"
        return back
    finally:
        await consumer.stop()


class _Committed(NamedTuple):
    group: str
    topic: str
    partition: int


def _commit_of(key: bytes, value: bytes | None) -> tuple[_Committed, int] | None:
    """Return a commit (Kafka's OffsetCommitKey and -Value); None for what else the broker notes there."""
    if value is None or int.from_bytes(key[:2]) > _NEWEST_COMMIT_KEY:
        return None
    group, rest = _text(key[2:])
    topic, rest = _text(rest)
    return _Committed(group, topic, int.from_bytes(rest[:4])), int.from_bytes(value[2:10])


def _text(data: bytes) -> tuple[str, bytes]:
    end = 2 + int.from_bytes(data[:2])
    return data[2:end].decode(), data[end:]


def rows(url: str) -> dict[str, frozenset[str]]:
    """Return the event ids in each table."""
    with psycopg.connect(_dsn(url)) as connection:
        return {
            table: frozenset(
                str(event_id)
                for (event_id,) in connection.execute(
                    sql.SQL("SELECT event_id::text FROM {}").format(sql.Identifier(table))
                )
            )
            for table in TABLES
        }


def marked_twice(url: str) -> tuple[str, ...]:
    """Return the places of the log that the projector's progress tables have more than one mark of.

    A batch that was written twice leaves that for good: rows are merged, and a chain is made whole by who reads again.
    """
    with psycopg.connect(_dsn(url)) as connection, connection.cursor() as cursor:
        return tuple(
            f"{topic}-{partition} offset {block.number * BLOCK_OFFSETS + at}"
            for (topic, partition), blocks in blocks_of(cursor).items()
            for block in blocks
            for at, marks in Counter(block.marks[:: 1 + MARK_BYTES]).items()
            if marks > 1
        )


def _dsn(url: str) -> str:
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def manifests(folder: Path) -> Mapping[int, BatchPlanned]:
    """Return the plan in each checkpoint's manifest; raises UnusableCheckpoint for one that is not whole."""
    found = [read(path, contents=False) for path in sorted(folder.glob("v*"))]
    return {checkpoint.version: checkpoint.plan for checkpoint in found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """What `clawstream audit verify` says."""

    rows_differ: int
    chain_breaks: int
    records: int


async def audited(config: Path) -> Audited:
    """Run the audit as an operator does."""
    arguments: Sequence[str] = ("-m", "clawstream", "--config", str(config), "audit", "verify", "--json")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=inherited_environment(),
    )  # fmt: skip
    async with asyncio.timeout(_AUDIT_WITHIN_S):
        said, words = await process.communicate()
    if not said.strip():
        raise RuntimeError(f"the audit said nothing, and ended with {process.returncode}: {words.decode()[-1000:]}")
    found = json.loads(said)
    return Audited(rows_differ=found["rows_differ"], chain_breaks=len(found["breaks"]), records=found["records"])
