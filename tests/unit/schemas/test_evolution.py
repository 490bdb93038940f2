"""A schema's next version fits those before it, and a log with records of several versions is read as if it had one.

Shown on an event of this module's own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.errors import UndecodableRecord
from clawstream.events import Event, SessionEvent
from clawstream.stream.avro import Codec, Plain, Upcast
from clawstream.stream.schemas import load, problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """What was heard; a bell's is said since version 2."""

    seconds: int
    tone: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSound:
    """As version 1 had it."""

    seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BellRung(SessionEvent):
    """A bell rang, in the words of the newest version."""

    times: int
    sounds: tuple[Sound, ...] = ()
    last: Sound | None = None
    why: str | None = None


def first_version_of_the_event() -> type[Event]:
    """The event as the code of version 1 had it."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class BellRung(SessionEvent):
        times: int
        sounds: tuple[FirstSound, ...] = ()
        last: FirstSound | None = None

    return BellRung


FirstBellRung: Any = first_version_of_the_event()


def field(name: str, kind: Any) -> dict[str, Any]:
    """A field of a schema; one that may be absent is so by default."""
    return {"name": name, "type": kind} | ({"default": None} if isinstance(kind, list) else {})


OPTIONAL = ["null", "string"]
TONE = field("tone", OPTIONAL)


def sound(name: str, *more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [field("seconds", "long"), *more]}


def bell(*of_sounds: Any, **changes: Any) -> Any:
    """The schema with these fields in each sound, and changes to its own; None takes one away."""
    fields = {
        "session_id": field("session_id", "string"),
        "times": field("times", "long"),
        "sounds": field("sounds", {"type": "array", "items": sound("Sound", *of_sounds)}),
        "last": field("last", ["null", sound("LastSound", *of_sounds)]),
    } | changes
    return {"type": "record", "name": "BellRung", "fields": [found for found in fields.values() if found is not None]}


def add(folder: Path, version: int, schema: Any) -> None:
    (folder / f"bell_rung.v{version}.avsc").write_text(json.dumps(schema))


def codec_of(folder: Path, kind: type[Event] = BellRung, upcasters: Mapping[Any, Upcast] | None = None) -> Codec:
    return Codec(load(folder, events=[kind]), upcasters=upcasters or {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the event's first version."""
    add(tmp_path, 1, bell())
    return tmp_path


@pytest.fixture
def old(folder: Path) -> bytes:
    """A record of the first version."""
    last = FirstSound(seconds=3)
    event = FirstBellRung(session_id="s", times=7, sounds=(FirstSound(seconds=2), last), last=last)
    return codec_of(folder, FirstBellRung).encode(event)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"why": field("why", "string")}, r"v2 can't read what v1 writes: BellRung.why was not written"),
        ({"times": None}, r"v1 can't read what v2 writes: BellRung.times was not written"),
        ({"times": field("times", "string")}, r"times was long and would be read as string"),
        ({"times": field("times", "double")}, r"v1 can't read what v2 writes: .* was double"),
        ({"times": field("times", ["null", "long"])}, r"v1 can't read what v2 writes: .* was null"),
    ],
)
def test_a_version_that_does_not_fit_the_others_is_refused(folder: Path, changes: Any, why: str) -> None:
    add(folder, 2, bell(**changes))
    with pytest.raises(ValueError, match=why):
        codec_of(folder)


def test_a_version_is_checked_against_all_before_it_and_not_the_last_alone(folder: Path) -> None:
    add(folder, 2, bell(why=field("why", OPTIONAL)))
    add(folder, 3, bell(note=field("note", OPTIONAL)))
    codec_of(folder)
    add(folder, 4, bell(why=field("why", ["null", "long"])))
    with pytest.raises(ValueError, match=r"BellRung v4 can't read what v2 writes: BellRung.why was string"):
        codec_of(folder)


def test_a_version_that_is_left_out_is_refused(folder: Path) -> None:
    add(folder, 3, bell(why=field("why", OPTIONAL)))
    with pytest.raises(ValueError, match=r"BellRung has versions \[1, 3\]"):
        codec_of(folder)


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


def test_a_field_that_an_older_record_lacks_has_its_default_at_any_depth(folder: Path, old: bytes) -> None:
    add(folder, 2, bell(TONE, why=field("why", OPTIONAL)))
    last = Sound(seconds=3)
    same = BellRung(session_id="s", times=7, sounds=(Sound(seconds=2), last), last=last)
    assert codec_of(folder).decode(old) == same
    assert codec_of(folder).decode(codec_of(folder).encode(same)) == same


def test_a_log_with_both_versions_says_what_each_record_says(folder: Path, old: bytes) -> None:
    add(folder, 2, bell(TONE, why=field("why", OPTIONAL)))
    codec = codec_of(folder)
    new = BellRung(session_id="s", times=1, last=Sound(seconds=1, tone="c"), why="noon")
    found = [codec.decode(value) for value in (old, codec.encode(new), old)]
    assert found[1] == new
    assert found[0] == found[2] != new


def test_the_last_version_can_not_mistake_a_newer_record_for_one_of_its_own(folder: Path) -> None:
    first = codec_of(folder, FirstBellRung)
    add(folder, 2, bell(TONE, why=field("why", OPTIONAL)))
    newer = codec_of(folder).encode(BellRung(session_id="s", times=1))
    with pytest.raises(UndecodableRecord, match="another version of clawstream"):
        first.decode(newer)


def test_what_an_older_record_means_is_said_step_by_step(folder: Path, old: bytes) -> None:
    """Three versions: the second adds a word, the third is of other words; a record of the first goes through both."""
    add(folder, 2, bell(TONE, note=field("note", OPTIONAL)))
    add(folder, 3, bell(TONE, why=field("why", OPTIONAL)))

    def to_second(plain: Plain) -> Plain:
        sounds = [{**one, "tone": None} for one in plain["sounds"]]
        return {**plain, "sounds": sounds, "last": None, "note": "old", "times": plain["times"] * 10}

    def to_third(plain: Plain) -> Plain:
        return {**{name: value for name, value in plain.items() if name != "note"}, "why": plain["note"]}

    both = codec_of(folder, upcasters={(BellRung, 1): to_second, (BellRung, 2): to_third}).decode(old)
    assert both == BellRung(session_id="s", times=70, sounds=(Sound(seconds=2), Sound(seconds=3)), why="old")
    second = codec_of(folder, upcasters={(BellRung, 1): to_second}).decode(old)
    assert isinstance(second, BellRung)
    assert (second.times, second.why) == (70, None)
