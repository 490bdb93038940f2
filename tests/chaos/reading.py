"""What there is to see after a run: read from the broker, the database, the disk and the audit."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg
from aiokafka.errors import KafkaError
from psycopg import sql
from sqlalchemy.engine import make_url

from clawstream.config import KafkaSettings, inherited_environment
from clawstream.errors import TryLater
from clawstream.events import BatchPlanned
from clawstream.stream.kafka import KafkaLog
from clawstream.stream.stage import Record
from clawstream.training.checkpoints import read
from tests.chaos.oracle import TABLES, Moved

TOPICS = (
    "clawstream.exchanges.v1", "clawstream.turns.v1", "clawstream.votes.v1", "clawstream.verdicts.v1",
    "clawstream.hints.v1", "clawstream.samples.v1", "clawstream.policy.v1",
)  # fmt: skip
GROUPS = ("turns", "judging", "samples", "project")
_LOOK_EVERY_S = 0.5
_AUDIT_WITHIN_S = 300.0


async def everything(log: KafkaLog) -> tuple[list[Record], list[str]]:
    """Return every record of the sessions' and the policy's topics, and what can't be read, each partition in order."""
    records: list[Record] = []
    bad: list[str] = []
    async for found in log.follow(TOPICS, until_end=True):
        for one in found:
            if isinstance(one, Record):
                records.append(one)
            else:
                bad.append(f"{one.topic}-{one.partition} offset {one.offset}: {one.reason}")
    return records, bad


async def watch_offsets(settings: KafkaSettings, moved: list[Moved]) -> None:
    """Note every offset of a group that goes back, until cancelled."""
    newest: dict[tuple[str, str, int], int] = {}
    assert settings.bootstrap is not None
    while True:
        try:
            async with KafkaLog.connect(settings.bootstrap, prefix=settings.prefix, client_id="chaos-watch") as log:
                while True:
                    for group in GROUPS:
                        for place, commit in (await log.committed(group)).items():
                            at = (group, *place)
                            if commit.offset < newest.get(at, 0):
                                moved.append(
                                    Moved(group=group, topic=place.topic, partition=place.partition,
                                          was=newest[at], found=commit.offset)
                                )  # fmt: skip
                            newest[at] = commit.offset
                    await asyncio.sleep(_LOOK_EVERY_S)
        except (TryLater, KafkaError, OSError, ConnectionError):
            await asyncio.sleep(_LOOK_EVERY_S)


def rows(url: str) -> dict[str, frozenset[str]]:
    """Return the event ids in each table."""
    dsn = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn) as connection:
        return {
            table: frozenset(
                str(event_id)
                for (event_id,) in connection.execute(
                    sql.SQL("SELECT event_id::text FROM {}").format(sql.Identifier(table))
                )
            )
            for table in TABLES
        }


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
