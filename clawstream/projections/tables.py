"""The tables. Those of facts are each filled from one topic, with columns from its events' fields; their meanings
are in docs/dictionary.md.

An event's row is keyed by the event id, and holds the record's topic, partition, offset and time. Each other column has
the name of an event's field; the fields of a request stand beside those of its exchange. A column may be NULL where its
field may be None, or where one of the table's events lacks the field.

No table has a foreign key to another: topics are read at different speeds, so only the views join tables. Text and JSON
are stored as clawstream/projections/text.py says. The projector keeps its progress in the progress tables `offsets`,
`chain_blocks`, `set_aside` and `commits`; `overruled` keeps what they said where a rebuild did not follow them.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Computed,
    DateTime,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    Uuid,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, REAL
from sqlalchemy.types import TypeEngine

from clawstream import events
from clawstream.events import Event
from clawstream.resources import folder
from clawstream.stream.topics import topic_of

_RELATION = re.compile(r"^### `(\w+)`\n\nA row is (.+)\.$", re.MULTILINE)
_COLUMN = re.compile(r"^\| `(\w+)` \| .+? \| (.+) \|$", re.MULTILINE)


def _read(page: str) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """Return the meaning of a row of each relation, and of each of its columns."""
    relations: dict[str, str] = {}
    columns: dict[tuple[str, str], str] = {}
    _, *parts = _RELATION.split(page)
    for name, row, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        relations[name] = row
        columns |= {(name, column): words for column, words in _COLUMN.findall(body)}
    return relations, columns


_relations, _columns = _read((folder("docs") / "dictionary.md").read_text())
RELATION_MEANINGS: Mapping[str, str] = MappingProxyType(_relations)


def meaning(relation: str, column: str) -> str | None:
    """Return the meaning of a column of a table or view; None where the page has none."""
    return _columns.get((relation, column))


_PLAIN = MappingProxyType({str: Text, int: BigInteger, float: Double, bool: Boolean})
_PACKED = MappingProxyType(
    {events.Packed.INT32: Integer, events.Packed.FLOAT32: REAL, events.Packed.INT8: SmallInteger}
)
_ITEMS = MappingProxyType({str: Text, int: Integer, float: Double})


def columns_of(kinds: Collection[type[Event]]) -> list[Column[Any]]:
    """Return a column for each field of these events, in their order."""
    hints = [_fields(kind) for kind in kinds]
    return [
        Column(name, _type(hint), nullable=not all(name in one and not _may_be_none(one[name]) for one in hints))
        for name, hint in {name: hint for one in reversed(hints) for name, hint in one.items()}.items()
    ]


def _fields(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint = hints[field.name]
        found |= _fields(hint) if hint is events.RequestDelta else {field.name: hint}
    return found


def _may_be_none(hint: Any) -> bool:
    return NoneType in get_args(hint)


def _type(hint: Any) -> TypeEngine[Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return ARRAY(_PACKED[arguments[1]])
    if origin in (UnionType, Union):
        [other] = (part for part in arguments if part is not NoneType)
        return _type(other)
    if origin is tuple:
        return ARRAY(_ITEMS[arguments[0]]) if arguments[0] in _ITEMS else JSONB()
    if hint is bytes or is_dataclass(hint):  # bytes are JSON
        return JSONB()
    return Text() if issubclass(hint, Enum) else _PLAIN[hint]()


metadata = MetaData()

_SAMPLE_ID = Column("sample_id", Text, Computed("event_id::text", persisted=True), nullable=False)
_IN_SESSION = ("session_id", "source_partition", "source_offset")
_VERSION = ("policy_id", "policy_version")


def _required(name: str, kind: object) -> Column[object]:
    return Column(name, kind, nullable=False)  # type: ignore[arg-type]


def _facts(name: str, kinds: Mapping[type[Event], str | None], *more: Column[Any], **indexes: Sequence[str]) -> Table:
    """Return a table of these events of one topic; where there are several, a row's `kind` says which event it is."""
    return Table(
        name,
        metadata,
        Column("event_id", Uuid, primary_key=True),
        _required("source_topic", Text),
        _required("source_partition", Integer),
        _required("source_offset", BigInteger),
        _required("log_time", DateTime(timezone=True)),
        *([_required("kind", Text)] if len(kinds) > 1 else []),
        *columns_of(kinds),
        *more,
        *(Index(f"{name}_{suffix}", *columns) for suffix, columns in indexes.items()),
        info={"topic": topic_of(next(iter(kinds))), "events": kinds},
    )


def _progress_table(name: str, *columns: Column[Any], key: Sequence[str] = ()) -> Table:
    """Return a table of the projector's progress, keyed by partition and `key`."""
    place = (_required("topic", Text), _required("partition", Integer))
    return Table(name, metadata, *place, *columns, PrimaryKeyConstraint("topic", "partition", *key))


exchanges = _facts(
    "exchanges",
    {events.ExchangeCompleted: "completed", events.ExchangeFailed: "failed"},
    in_session_order=_IN_SESSION,
    by_exchange_id=["exchange_id", "kind"],
    in_log_order=["source_partition", "source_offset"],
)
session_ends = _facts(
    "session_ends", {events.SessionDone: "done", events.SessionIdle: "idle"}, in_session_order=_IN_SESSION
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", Text, primary_key=True),
    _required("source_partition", Integer),
    _required("first_offset", BigInteger),
    _required("first_at", DateTime(timezone=True)),
    _required("last_offset", BigInteger),
    _required("last_at", DateTime(timezone=True)),
    Column("client", Text),  # of the first exchange
    Column("model", Text),
    _required("num_main", BigInteger),
    _required("num_side", BigInteger),
    _required("num_failed", BigInteger),
    Column("done_at", DateTime(timezone=True)),
    Column("idle_at", DateTime(timezone=True)),
)

turns = _facts(
    "turns",
    {events.TurnPaired: "paired", events.TurnOrphaned: "orphaned"},
    in_session_order=_IN_SESSION,
    by_turn=["turn_id"],
)
settlements = _facts("settlements", {events.TurnsSettled: None}, in_session_order=_IN_SESSION)
votes = _facts("votes", {events.VoteCast: None}, in_session_order=_IN_SESSION, by_turn=["turn_id"])
verdicts = _facts("verdicts", {events.VerdictReached: None}, in_session_order=_IN_SESSION, by_turn=["turn_id"])
hints = _facts(
    "hints", {events.HintFound: "found", events.HintAbsent: "absent"}, in_session_order=_IN_SESSION, by_turn=["turn_id"]
)
teacher_scores = _facts(
    "teacher_scores", {events.TeacherScored: None}, in_session_order=_IN_SESSION, by_turn=["turn_id"]
)
feedback = _facts("feedback", {events.FeedbackGiven: None}, in_session_order=_IN_SESSION, by_turn=["turn_id"])
samples = _facts(
    "samples",
    {events.SampleAssembled: None},
    _SAMPLE_ID,
    in_session_order=_IN_SESSION,
    by_turn=["turn_id"],
    by_sample_id=["sample_id"],
)
refresh_asks = _facts("refresh_asks", {events.RefreshAsked: None}, in_session_order=_IN_SESSION)
rehearsal_asks = _facts("rehearsal_asks", {events.RehearsalAsked: None}, in_session_order=_IN_SESSION)
held_hints = _facts(
    "held_hints", {events.HintHeld: "held", events.HintRetired: "retired"}, by_hint=["hint_id", "source_offset"]
)
refreshed_answers = _facts(
    "refreshed_answers", {events.AnswerRefreshed: None}, in_session_order=_IN_SESSION, by_turn=["turn_id"]
)
refusals = _facts("refusals", {events.SampleRefused: None}, in_session_order=_IN_SESSION)
ended_trajectories = _facts(
    "ended_trajectories", {events.TrajectoryEnded: None}, in_session_order=_IN_SESSION, by_group=["group_id"]
)
groups = _facts(
    "groups",
    {events.GroupWaited: "waited", events.GroupSettled: "settled", events.TrajectoryLate: "late"},
    by_group=["group_id", "source_offset"],
)
batches = _facts("batches", {events.BatchPlanned: None}, by_version=_VERSION)
steps = _facts("steps", {events.StepTaken: None}, by_version=_VERSION)
bases = _facts("bases", {events.BaseNamed: None})
policies = _facts("policies", {events.PolicyPublished: None}, by_version=_VERSION)
activations = _facts("activations", {events.PolicyActivated: None}, by_version=_VERSION)
rejections = _facts("rejections", {events.PolicyRejected: "engine", events.StepRejected: "step"}, by_version=_VERSION)
replays = _facts("replays", {events.ReplayStarted: None})
replay_ends = _facts("replay_ends", {events.ReplayEnded: None})
promotions = _facts("promotions", {events.SamplesPromoted: None})
rollbacks = _facts("rollbacks", {events.RollbackAsked: None})
pins = _facts("pins", {events.VersionPinned: None})

offsets = _progress_table(
    "offsets",
    _required("next_offset", BigInteger),
    _required("epoch", BigInteger),  # raised by each claim of the partition; only the newest claim may write
    Column("chain", LargeBinary),  # see clawstream/projections/write/chain.py; NULL: nothing was read
    Column("chain_from", BigInteger),  # the offset of the chain's first record
)

chain_blocks = _progress_table(
    "chain_blocks",
    _required("block", BigInteger),
    _required("next_offset", BigInteger),
    _required("chain", LargeBinary),
    _required("marks", LargeBinary),
    key=["block"],
)

set_aside = _progress_table(
    "set_aside",  # records that were read but have no row; see clawstream/projections/write/quarantine.py
    _required("source_offset", BigInteger),
    _required("log_time_ms", BigInteger),
    Column("record_key", LargeBinary),
    _required("reason", Text),  # undecodable, unusable, failed, parked
    _required("error", Text),
    _required("attempt", BigInteger),
    _required("fate", Text),  # open (it waits) or discarded
    key=["source_offset"],
)

overruled = _progress_table(
    "overruled",  # what the progress tables said before a rebuild with `--trust-log`
    _required("overruled_at", DateTime(timezone=True)),
    _required("next_offset", BigInteger),
    Column("chain", LargeBinary),
    _required("made_next_offset", BigInteger),  # this and `made_chain`: the same two after the rebuild
    Column("made_chain", LargeBinary),
    _required("kept_schema", Text),  # the schema in which the old tables were left
    key=["overruled_at"],
)

commits = _progress_table(
    "commits",
    _required("next_offset", BigInteger),
    _required("first_offset", BigInteger),
    _required("committed_at", DateTime(timezone=True)),
    key=["next_offset"],
)

FACTS = tuple(table for table in metadata.sorted_tables if "topic" in table.info)
TOPICS = tuple(dict.fromkeys(table.info["topic"] for table in FACTS))
RELATIONS = tuple(dict.fromkeys((*metadata.tables, *RELATION_MEANINGS)))  # everything that people may read
for table in metadata.tables.values():
    table.comment = RELATION_MEANINGS.get(table.name)
    for column in table.columns:
        column.comment = meaning(table.name, column.name)
