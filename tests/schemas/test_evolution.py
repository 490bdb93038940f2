"""A file in schemas/ is final, its next version fits, and a log with several versions folds as if it had one."""

import hashlib
import json
import shutil
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream import resources
from clawstream.config import TurnsSettings
from clawstream.events import Event, SampleAssembled, SessionIdle
from clawstream.projections.tables import samples
from clawstream.projections.write.cells import NULL
from clawstream.projections.write.rows import columns, row
from clawstream.stream.codec.avro import Codec, codec
from clawstream.stream.codec.compatibility import problems
from clawstream.stream.codec.plain import to_plain
from clawstream.stream.codec.schemas import LOCK, Schema, all_schemas, load
from clawstream.stream.codec.upcasting import UPCASTERS, Plain, Upcast, unsaid
from clawstream.stream.memory.memory_log import MemoryBroker, MemoryLog
from clawstream.turns.stage import turns_stage
from tests.sessions import Session, assistant, user
from tests.stream import toys
from tests.stream.raw import append_bytes

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of schemas/ to change."""
    return shutil.copytree(resources.folder("schemas"), tmp_path / "schemas")


def add(folder: Path, name: str, schema: Any) -> None:
    """A new file, with its line in the lock."""
    data = json.dumps(schema).encode()
    (folder / name).write_bytes(data)
    with (folder / LOCK).open("a") as lock:
        lock.write(f"{hashlib.sha256(data).hexdigest()}  {name}\n")


def idle(**changes: Any) -> Any:
    """SessionIdle's first schema with changes to its fields; None takes one away."""
    schema = json.loads((resources.folder("schemas") / "session_idle.v1.avsc").read_text())
    fields = {field["name"]: field for field in schema["fields"]} | changes
    return schema | {"fields": [field for field in fields.values() if field is not None]}


def test_an_edited_file_is_refused_and_the_message_says_what_to_do(folder: Path) -> None:
    path = folder / "vote_cast.v1.avsc"
    path.write_text(path.read_text().replace('"doc"', '"doc" '))
    with pytest.raises(ValueError, match=r"vote_cast\.v1\.avsc was edited.*the next version in a file of its own"):
        load(folder)


def test_a_file_that_is_gone_is_refused(folder: Path) -> None:
    (folder / "exchange_failed.v1.avsc").unlink()
    with pytest.raises(ValueError, match=r"exchange_failed\.v1\.avsc is gone"):
        load(folder)


def test_a_file_without_its_line_in_the_lock_is_refused(folder: Path) -> None:
    (folder / "session_idle.v2.avsc").write_text(json.dumps(idle()))
    with pytest.raises(ValueError, match=r"session_idle\.v2\.avsc is not in SHA256SUMS"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"why": {"name": "why", "type": "string"}}, r"v2 can't read what v1 writes: SessionIdle.why was not written"),
        ({"idle_s": None}, r"v1 can't read what v2 writes: SessionIdle.idle_s was not written"),
        ({"idle_s": {"name": "idle_s", "type": "string"}}, r"idle_s was long and would be read as string"),
        ({"idle_s": {"name": "idle_s", "type": "double"}}, r"v1 can't read what v2 writes: .* was double"),
        ({"idle_s": {"name": "idle_s", "type": ["null", "long"]}}, r"v1 can't read what v2 writes: .* was null"),
    ],
)
def test_a_version_that_does_not_fit_the_others_is_refused(folder: Path, changes: Any, why: str) -> None:
    add(folder, "session_idle.v2.avsc", idle(**changes))
    with pytest.raises(ValueError, match=why):
        load(folder)


def test_a_version_is_checked_against_all_before_it_and_not_the_last_alone(folder: Path) -> None:
    optional = {"type": ["null", "string"], "default": None}
    add(folder, "session_idle.v2.avsc", idle(why={"name": "why"} | optional))
    add(folder, "session_idle.v3.avsc", idle(note={"name": "note"} | optional))
    load(folder)
    add(folder, "session_idle.v4.avsc", idle(why={"name": "why", "type": ["null", "long"], "default": None}))
    with pytest.raises(ValueError, match=r"SessionIdle v4 can't read what v2 writes: SessionIdle.why was string"):
        load(folder)


def test_a_version_that_is_left_out_is_refused(folder: Path) -> None:
    add(folder, "session_idle.v3.avsc", idle(why={"name": "why", "type": ["null", "string"], "default": None}))
    with pytest.raises(ValueError, match=r"SessionIdle has versions \[1, 3\]"):
        load(folder)


@pytest.mark.parametrize(
    "schema", [{"type": "enum", "name": "E", "symbols": ["A"]}, {"type": "map", "values": "int"}, "Named"]
)
def test_a_kind_of_schema_that_is_not_known_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match="can't be checked"):
        problems(schema, schema)


SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(["null", "boolean", "int", "long", "float", "double", "string"]),
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(
            lambda types: {
                "type": "record",
                "name": "R",
                "fields": [{"name": f"f{number}", "type": kind} for number, kind in enumerate(types)],
            },
            st.lists(st.sampled_from(["int", "double", "string", ["null", "int"]]), max_size=3),
        )
    ),
    max_leaves=3,
)
_VALUES = {"null": None, "boolean": True, "int": 1, "long": 2**40, "float": 0.5, "double": 0.1, "string": "s"}


def value_of(schema: Any) -> Any:
    if isinstance(schema, list):
        return value_of(schema[-1])
    if isinstance(schema, str):
        return _VALUES[schema]
    if schema["type"] == "array":
        return [value_of(schema["items"])]
    return {field["name"]: value_of(field["type"]) for field in schema["fields"]}


@given(SCHEMAS, SCHEMAS)
def test_what_is_said_to_fit_can_be_read_by_the_library(written: Any, reading: Any) -> None:
    if problems(written, reading):
        return
    out = BytesIO()
    fastavro.schemaless_writer(out, written, value_of(written))
    out.seek(0)
    fastavro.schemaless_reader(out, written, reading)


def of(kind: type[Event], version: int) -> Schema:
    [found] = [schema for schema in all_schemas() if schema.event is kind and schema.version == version]
    return found


def written_as(event: Event, version: int) -> bytes:
    """The event's bytes as the codec of an earlier version wrote them; what that version can't say is left out."""
    schema = of(type(event), version)
    out = BytesIO()
    out.write(b"\xc3\x01" + schema.fingerprint)
    fastavro.schemaless_writer(out, schema.parsed, to_plain(type(event))(event))
    return out.getvalue()


def test_each_step_between_versions_has_an_upcaster_and_no_other_has() -> None:
    newest = {schema.event: schema.version for schema in all_schemas()}
    steps = {(schema.event, schema.version) for schema in all_schemas() if schema.version < newest[schema.event]}
    assert set(UPCASTERS) == steps


def test_a_codec_without_an_upcaster_is_refused() -> None:
    fewer = {step: upcast for step, upcast in UPCASTERS.items() if step != (SampleAssembled, 1)}
    with pytest.raises(ValueError, match="SampleAssembled v1 has no upcaster to v2"):
        Codec(all_schemas(), upcasters=fewer)


def test_upcasters_run_one_after_the_other(folder: Path) -> None:
    """Three versions: the second adds a word, the third is of other words; a record of the first goes through both."""
    optional = {"type": ["null", "string"], "default": None}
    add(folder, "session_idle.v2.avsc", idle(why={"name": "why"} | optional))
    add(folder, "session_idle.v3.avsc", idle(note={"name": "note"} | optional))
    ran: list[int] = []

    def step(version: int, plain: Plain) -> Plain:
        ran.append(version)
        return {**plain, "idle_s": plain["idle_s"] * 10 + version}

    upcasters: dict[tuple[type[Event], int], Upcast] = dict(UPCASTERS)
    upcasters |= {(SessionIdle, number): partial(step, number) for number in (1, 2)}
    old = SessionIdle(session_id="s", after_exchange_id="x", idle_s=7)
    decoded = Codec(load(folder), upcasters=upcasters).decode(codec().encode(old))
    assert decoded == SessionIdle(session_id="s", after_exchange_id="x", idle_s=712)
    assert ran == [1, 2]


def test_what_was_not_said_is_absent() -> None:
    assert unsaid("a", "b")({"c": 1}) == {"a": None, "b": None, "c": 1}


async def test_rows_of_a_log_with_both_versions_differ_only_in_what_the_older_one_did_not_say() -> None:
    log = MemoryLog(MemoryBroker(partitions=1))
    for version in (1, 2):
        golden = json.loads((GOLDEN / f"sample_assembled.v{version}.json").read_text())
        value = bytes.fromhex(golden["bytes"])
        await append_bytes(log, "clawstream.samples.v1", golden["means"]["session_id"].encode(), value, [])
    older, newer = [row(record) for record in await toys.read(log, "clawstream.samples.v1")]
    assert older is not None
    assert newer is not None
    differing = {
        name: (was, now)
        for name, was, now in zip(columns(samples), older.cells, newer.cells, strict=True)
        if was != now
    }
    assert differing.pop("source_offset") == ("0", "1")
    differing.pop("log_time", None)
    assert set(differing) == {"sampling"}
    was, now = differing["sampling"]
    assert was == NULL
    copied = now.replace("\\\\", "\\")  # a cell is as COPY reads it
    assert json.loads(copied) == golden["means"]["sampling"] | {"shaping": None}


async def test_turns_of_a_log_with_both_versions_are_those_of_a_log_with_one() -> None:
    session, messages = Session(), [user("hello")]
    for number in range(6):
        session.ask(messages, f"answer {number}")
        messages = [*messages, assistant(f"answer {number}"), user(f"reply {number}")]
    found = []
    for versions in ([2], [1], [1, 2], [2, 1]):
        log = MemoryLog(MemoryBroker(partitions=1))
        for number, exchange in enumerate(session.written):
            value = written_as(exchange, versions[number % len(versions)])
            await append_bytes(log, toys.EXCHANGES, exchange.key.encode(), value, [])
        async with toys.running(turns_stage(TurnsSettings()), log):
            await toys.settled(log, "turns")
        found.append([record.event for record in await toys.read(log, toys.TURNS)])
    assert len(found[0]) == 5
    assert all(turns == found[0] for turns in found)
