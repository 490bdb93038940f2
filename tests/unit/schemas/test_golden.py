"""One record of each schema version, as it was once written: it means what it meant then, whatever has changed since.

The files hold the record's bytes in hexadecimal and its meaning as JSON, bytes in it as UTF-8 text. Those of
a released version are never edited; a new version of a schema comes with a file of its own.
"""

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from clawstream.stream.avro import codec
from clawstream.stream.schemas import all_schemas, snake_name

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = [(f"{snake_name(schema.event)}.v{schema.version}", schema) for schema in all_schemas()]


def meaning(value: Any) -> Any:
    """The value as JSON has it."""
    if is_dataclass(value):
        return {field.name: meaning(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [meaning(part) for part in value]
    if isinstance(value, Enum):
        return value.value
    return value.decode() if isinstance(value, bytes) else value


def with_unsaid(means: Any, value: Any) -> Any:
    """What a golden file says a value means, with None for each field that was not said then."""
    if isinstance(means, dict):
        assert means.keys() <= {field.name for field in fields(value)}
        return {field.name: with_unsaid(means.get(field.name), getattr(value, field.name)) for field in fields(value)}
    if isinstance(means, list):
        return [with_unsaid(part, inner) for part, inner in zip(means, value, strict=True)]
    return means


@pytest.mark.parametrize("name", [name for name, _ in VERSIONS])
def test_a_record_means_what_it_meant_when_it_was_written(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    event = codec().decode(bytes.fromhex(golden["bytes"]))
    assert snake_name(type(event)) == name.split(".")[0]
    assert meaning(event) == with_unsaid(golden["means"], event)


@pytest.mark.parametrize("name", [name for name, schema in VERSIONS])
def test_the_bytes_name_the_schema_version_of_their_file(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    assert bytes.fromhex(golden["bytes"])[2:10] == dict(VERSIONS)[name].fingerprint


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, schema in VERSIONS
        if schema.version == max(s.version for _, s in VERSIONS if s.event is schema.event)
    ],
)
def test_the_newest_version_is_written_as_it_was(name: str) -> None:
    written = bytes.fromhex(json.loads((GOLDEN / f"{name}.json").read_text())["bytes"])
    assert codec().encode(codec().decode(written)) == written


def test_every_version_has_its_record_and_no_other() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == {name for name, _ in VERSIONS}
