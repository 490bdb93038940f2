"""The files in schemas/ and the dataclasses in clawstream/events say the same, and a released file stays as it is."""

import json
import shutil
import subprocess
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from clawstream import resources
from clawstream.events import EVENTS, Event
from clawstream.stream.schemas import Schema, all_schemas, fingerprint, load, snake_name

FILES = sorted(resources.folder("schemas").glob("*.avsc"))


def newest(kind: type[Event]) -> Schema:
    return max((schema for schema in all_schemas() if schema.event is kind), key=lambda schema: schema.version)


def record_names(schema: Any) -> list[tuple[str, list[str]]]:
    """Every record in the schema with the names of its fields, outermost first."""
    if isinstance(schema, list):
        return [found for part in schema for found in record_names(part)]
    if not isinstance(schema, dict):
        return []
    inner = [found for part in schema.get("fields", []) for found in record_names(part["type"])]
    own = [(schema["name"], [part["name"] for part in schema["fields"]])] if schema["type"] == "record" else []
    return own + inner + record_names(schema.get("items"))


def dataclass_names(kind: Any) -> list[tuple[str, list[str]]]:
    """Every dataclass that the fields hold with the names of its fields, outermost first."""
    if is_dataclass(kind):
        assert isinstance(kind, type)
        hints = get_type_hints(kind, include_extras=True)
        own = (kind.__name__, [field.name for field in fields(kind)])
        return [own, *(found for hint in hints.values() for found in dataclass_names(hint))]
    return [found for part in get_args(kind) for found in dataclass_names(part)]


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_a_schema_has_the_fields_of_its_dataclass_in_their_order(kind: type[Event]) -> None:
    schema = json.loads(newest(kind).text)
    assert record_names(schema) == dataclass_names(kind)
    assert schema["namespace"] == "clawstream." + kind.__module__.rsplit(".", 1)[1]


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_a_field_that_may_be_absent_has_null_first_and_as_its_default(kind: type[Event]) -> None:
    hints = get_type_hints(kind, include_extras=True)
    for field in json.loads(newest(kind).text)["fields"]:
        optional = type(None) in get_args(hints[field["name"]])
        assert isinstance(field["type"], list) == optional
        assert ("default" in field) == optional
        if optional:
            assert field["type"][0] == "null"
            assert field["default"] is None


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_a_token_array_is_bytes_and_says_how_it_is_packed(kind: type[Event]) -> None:
    hints = get_type_hints(kind, include_extras=True)
    for field in json.loads(newest(kind).text)["fields"]:
        if get_origin(hints[field["name"]]) is Annotated:
            assert field["type"] == "bytes"
            assert "packed" in field["doc"]


def test_fingerprints_are_those_of_avro() -> None:
    assert fingerprint("int").hex() == "8f5c393f1ad57572"


def test_two_versions_that_a_record_can_not_tell_apart_are_refused(tmp_path: Path) -> None:
    for path in FILES:
        (tmp_path / path.name).write_text(path.read_text())
    first = json.loads((tmp_path / "session_idle.v1.avsc").read_text())
    (tmp_path / "session_idle.v2.avsc").write_text(json.dumps(first | {"doc": "something else"}))
    with pytest.raises(ValueError, match=r"SessionIdle v2 and SessionIdle v1|SessionIdle v1 and SessionIdle v2"):
        load(tmp_path)


def test_an_event_without_a_schema_is_refused(tmp_path: Path) -> None:
    for path in FILES:
        if not path.name.startswith("session_idle."):
            (tmp_path / path.name).write_text(path.read_text())
    with pytest.raises(ValueError, match="no schema for SessionIdle"):
        load(tmp_path)


def test_a_file_that_names_no_event_is_refused(tmp_path: Path) -> None:
    (tmp_path / "session_asleep.v1.avsc").write_text("{}")
    with pytest.raises(ValueError, match=r"session_asleep\.v1\.avsc"):
        load(tmp_path)


def test_file_names_follow_from_the_events() -> None:
    assert {path.name.split(".")[0] for path in FILES} == set(map(snake_name, EVENTS))


ROOT = Path(__file__).parents[3]


def git(root: Path, *command: str) -> str:
    return subprocess.run(["git", "-C", str(root), *command], check=True, capture_output=True, text=True).stdout


def changed_since_release(root: Path) -> list[str]:
    """The schema files of the newest tag that are not in `root` as they were then; none where nothing was released."""
    if shutil.which("git") is None or not (root / ".git").exists():
        return []
    tags = git(root, "tag", "--list", "v*", "--sort=-version:refname").split()
    return git(root, "diff", "--name-only", "--diff-filter=a", tags[0], "--", "schemas").split() if tags else []


def test_no_released_schema_was_edited() -> None:
    found = changed_since_release(ROOT)
    assert found == [], f"records were written with {found}: restore them, and write what is new as the next version"


def test_an_edited_or_missing_file_of_the_newest_release_is_found_and_a_new_one_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "schemas"
    folder.mkdir()
    for name in ("a.v1.avsc", "b.v1.avsc", "c.v1.avsc"):
        (folder / name).write_text("{}")
    git(tmp_path, "init", "-q")
    assert changed_since_release(tmp_path) == []
    for tag in ("v0.9.0", "v0.10.0"):
        (folder / "c.v1.avsc").write_text(tag)
        git(tmp_path, "add", ".")
        git(tmp_path, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", tag)
        git(tmp_path, "tag", tag)
    (folder / "d.v2.avsc").write_text("new")
    (folder / "a.v1.avsc").write_text("edited")
    (folder / "b.v1.avsc").unlink()
    assert changed_since_release(tmp_path) == ["schemas/a.v1.avsc", "schemas/b.v1.avsc"]
