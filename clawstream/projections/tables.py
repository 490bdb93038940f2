"""The tables, each fed by one topic; what a column means is said in clawstream/projections/meanings.py.

A fact's row stands under its event id, beside the place and the time at which the log holds it. No table refers to
another: topics are read at different speeds, so joins live in the views. Text and JSON are stored as
clawstream/projections/text.py says. `offsets`, `chain_blocks`, `set_aside` and `commits` are the projector's own books,
`overruled` is what they said where a rebuild did not follow them. All in one file, as this is where people look a
column up.
"""

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

from clawstream.projections import meanings

EXCHANGES = "clawstream.exchanges.v1"
TURNS = "clawstream.turns.v1"
VOTES = "clawstream.votes.v1"
VERDICTS = "clawstream.verdicts.v1"
HINTS = "clawstream.hints.v1"
FEEDBACK = "clawstream.feedback.v1"
SAMPLES = "clawstream.samples.v1"
ANSWERS = "clawstream.answers.v1"
GROUPS = "clawstream.groups.v1"
POLICY = "clawstream.policy.v1"
CONTROL = "clawstream.control.v1"

metadata = MetaData()

_TOKENS = ARRAY(Integer)
_LOGPROBS = ARRAY(REAL)


def _must(name: str, kind: object) -> Column[object]:
    return Column(name, kind, nullable=False)  # type: ignore[arg-type]


def _may(name: str, kind: object) -> Column[object]:
    return Column(name, kind)  # type: ignore[arg-type]


def _facts(name: str, topic: str, *items: Column[object] | Index) -> Table:
    return Table(
        name,
        metadata,
        Column("event_id", Uuid, primary_key=True),
        _must("source_topic", Text),
        _must("source_partition", Integer),
        _must("source_offset", BigInteger),
        _must("log_time", DateTime(timezone=True)),
        *items,
        info={"topic": topic},
    )


def _session_facts(name: str, topic: str, *items: Column[object] | Index) -> Table:
    in_order = Index(f"{name}_in_session_order", "session_id", "source_partition", "source_offset")
    return _facts(name, topic, _must("session_id", Text), *items, in_order)


def _policy_facts(name: str, *items: Column[object]) -> Table:
    by_version = Index(f"{name}_by_version", "policy_id", "policy_version")
    return _facts(name, POLICY, _must("policy_id", Text), _must("policy_version", BigInteger), *items, by_version)


def _judged(name: str, topic: str, *items: Column[object] | Index) -> Table:
    return _session_facts(
        name,
        topic,
        _must("turn_id", Text),
        _must("judge", Text),
        _must("prompt_version", Text),
        _must("revision", BigInteger),
        *items,
        Index(f"{name}_by_turn", "turn_id"),
    )


exchanges = _session_facts(
    "exchanges",
    EXCHANGES,
    _must("kind", Text),  # completed, failed
    _must("exchange_id", Text),
    _must("turn_type", Text),
    _must("client", Text),
    _may("key_name", Text),
    _must("model", Text),
    _may("parent_exchange_id", Text),
    _must("kept_messages", BigInteger),
    _must("kept_tokens", BigInteger),
    _must("messages", JSONB),
    _must("token_ids", _TOKENS),
    _may("options", JSONB),
    _may("request_sha256", Text),
    _may("retry_count", BigInteger),
    _may("sampling", JSONB),
    _must("policy_id", Text),
    _may("versions", JSONB),
    _may("message", JSONB),
    _must("output_ids", _TOKENS),
    _may("output_logprobs", _LOGPROBS),
    _may("finish_reason", Text),
    _may("cached_tokens", BigInteger),
    _may("num_spliced", BigInteger),
    _may("trace_id", Text),
    _may("reason", Text),
    _may("status", BigInteger),
    _may("detail", Text),
    _must("received_at_ms", BigInteger),
    _may("first_token_at_ms", BigInteger),
    _must("finished_at_ms", BigInteger),
    _may("group_id", Text),
    _may("group_size", BigInteger),
    _may("step_index", BigInteger),
    _may("num_sent_tokens", BigInteger),
    _may("choice_of", Text),
    Index("exchanges_by_exchange_id", "exchange_id", "kind"),
    Index("exchanges_in_log_order", "source_partition", "source_offset"),
)

session_ends = _session_facts(
    "session_ends",
    EXCHANGES,
    _must("kind", Text),  # done, idle
    _may("after_exchange_id", Text),
    _may("idle_s", BigInteger),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", Text, primary_key=True),
    _must("source_partition", Integer),
    _must("first_offset", BigInteger),
    _must("first_at", DateTime(timezone=True)),
    _must("last_offset", BigInteger),
    _must("last_at", DateTime(timezone=True)),
    _may("client", Text),  # of the first exchange
    _may("model", Text),
    _must("num_main", BigInteger),
    _must("num_side", BigInteger),
    _must("num_failed", BigInteger),
    _may("done_at", DateTime(timezone=True)),
    _may("idle_at", DateTime(timezone=True)),
)

turns = _session_facts(
    "turns",
    TURNS,
    _must("kind", Text),  # paired, orphaned
    _must("turn_id", Text),
    _must("next_exchange_id", Text),
    _may("next_state", _TOKENS),
    _may("reason", Text),
    _may("interrupted", Boolean),
    Index("turns_by_turn", "turn_id"),
)

settlements = _session_facts(
    "settlements",
    TURNS,
    _must("after_exchange_id", Text),
    _must("done", Boolean),
)

votes = _judged(
    "votes",
    VOTES,
    _must("question", Text),
    _must("ballot", BigInteger),
    _must("status", Text),
    _may("score", BigInteger),
    _may("hint", Text),
    _may("text", Text),
    _may("error", Text),
    _may("prompt_tokens", BigInteger),
    _may("completion_tokens", BigInteger),
    _must("latency_ms", BigInteger),
    _must("cast_at_ms", BigInteger),
)

verdicts = _judged(
    "verdicts",
    VERDICTS,
    _must("status", Text),
    _may("score", BigInteger),
    _must("num_positive", BigInteger),
    _must("num_neutral", BigInteger),
    _must("num_negative", BigInteger),
    _must("num_unreadable", BigInteger),
    _must("num_failed", BigInteger),
)

hints = _judged(
    "hints",
    HINTS,
    _must("kind", Text),  # found, absent
    _may("hint", Text),
    _may("num_offered", BigInteger),
    _may("reason", Text),
)

teacher_scores = _judged(
    "teacher_scores",
    HINTS,
    _must("teacher", Text),
    _must("scored_sha256", Text),
    _must("policy_id", Text),
    _must("status", Text),
    _may("teacher_logprobs", _LOGPROBS),
    _may("student_logprobs", _LOGPROBS),
    _may("student_version", BigInteger),
    _may("error", Text),
    _must("latency_ms", BigInteger),
    _must("scored_at_ms", BigInteger),
)

feedback = _session_facts(
    "feedback",
    FEEDBACK,
    _must("feedback_id", Text),
    _must("turn_id", Text),
    _may("key_name", Text),
    _must("source", Text),
    _may("score", Double),
    _may("text", Text),
    _must("given_at_ms", BigInteger),
    Index("feedback_by_turn", "turn_id"),
)

samples = _judged(
    "samples",
    SAMPLES,
    Column("sample_id", Text, Computed("event_id::text", persisted=True), nullable=False),
    _may("reward", BigInteger),
    _may("hint", Text),
    _must("prompt_ids", _TOKENS),
    _may("hinted_prompt_ids", _TOKENS),
    _must("response_ids", _TOKENS),
    _must("response_logprobs", _LOGPROBS),
    _must("trained", ARRAY(SmallInteger)),
    _must("temperature", Double),
    _may("sampling", JSONB),
    _must("policy_id", Text),
    _must("versions", JSONB),
    _must("num_earlier_turns", BigInteger),
    _may("total_reward", Double),
    _may("person_reward", Double),
    _may("environment_reward", Double),
    _may("heuristic_reward", Double),
    _may("num_feedback", BigInteger),
    _may("teacher", Text),
    _may("teacher_logprobs", _LOGPROBS),
    _may("student_logprobs", _LOGPROBS),
    _may("student_version", BigInteger),
    _may("group_id", Text),
    _may("step_index", BigInteger),
    _may("refreshed_id", Text),
    Index("samples_by_sample_id", "sample_id"),
)

refresh_asks = _session_facts(
    "refresh_asks",
    ANSWERS,
    _must("turn_id", Text),
    _must("sample_id", Text),
    _must("policy_id", Text),
    _must("prompt_ids", _TOKENS),
    _must("sampling", JSONB),
    _must("asked_at_ms", BigInteger),
)

refreshed_answers = _session_facts(
    "refreshed_answers",
    ANSWERS,
    _must("turn_id", Text),
    _must("number", BigInteger),
    _must("policy_id", Text),
    _must("sampling", JSONB),
    _must("versions", JSONB),
    _may("message", JSONB),
    _must("output_ids", _TOKENS),
    _must("output_logprobs", _LOGPROBS),
    _may("finish_reason", Text),
    _may("error", Text),
    _must("answered_at_ms", BigInteger),
    Index("refreshed_answers_by_turn", "turn_id"),
)

refusals = _session_facts(
    "refusals",
    SAMPLES,
    _may("turn_id", Text),
    _may("judge", Text),
    _may("prompt_version", Text),
    _must("revision", BigInteger),
    _must("reason", Text),
    _may("refreshed_id", Text),
)

ended_trajectories = _session_facts(
    "ended_trajectories",
    GROUPS,
    _must("group_id", Text),
    _must("trajectory_id", Text),
    _must("revision", BigInteger),
    _must("ended_at_ms", BigInteger),
    _may("group_size", BigInteger),
    _may("outcome", Double),
    _must("steps", JSONB),
    Index("ended_trajectories_by_group", "group_id"),
)

groups = _facts(
    "groups",
    GROUPS,
    _must("group_id", Text),
    _must("kind", Text),  # waited, settled, late
    _may("wait_s", Double),
    _may("trajectories", ARRAY(Text)),
    _may("complete", Boolean),
    _may("advantages", JSONB),
    _may("dropped", JSONB),
    _may("trajectory", Text),
    _may("session_id", Text),
    Index("groups_by_group", "group_id", "source_offset"),
)

batches = _policy_facts(
    "batches",
    _must("parent_version", BigInteger),
    _must("sample_ids", ARRAY(Text)),
    _must("offsets", JSONB),
    _must("seed", BigInteger),
    _must("settings", JSONB),
    _must("planned_at_ms", BigInteger),
    _may("replay", Text),
    _may("rollback", BigInteger),
    _may("turns", JSONB),
    _may("advantages", ARRAY(Double)),
)

steps = _policy_facts(
    "steps",
    _must("num_samples", BigInteger),
    _must("num_hinted", BigInteger),
    _must("num_rewarded", BigInteger),
    _must("num_tokens", BigInteger),
    _must("num_tokens_dropped", BigInteger),
    _may("loss_nats", Double),
    _may("kl_reference_nats", Double),
    _may("mean_gap_nats", Double),
    _may("mean_reward", Double),
    _may("clipped_share", Double),
    _may("grad_norm", Double),
    _must("learning_rate", Double),
    _must("mean_versions_behind", Double),
    _must("max_versions_behind", BigInteger),
    _must("step_ms", BigInteger),
    _must("taken_at_ms", BigInteger),
    _may("entropy_nats", Double),
    _may("behaviour_kl_nats", Double),
    _may("mean_response_tokens", Double),
    _may("weights_changed_share", Double),
)

bases = _facts(
    "bases",
    POLICY,
    _must("policy_id", Text),
    _must("path", Text),
    _may("model_sha256", Text),
    _may("tokenizer_sha256", Text),
    _must("named_at_ms", BigInteger),
)

policies = _policy_facts(
    "policies",
    _may("parent_version", BigInteger),
    _must("path", Text),
    _may("adapter", Text),
    _may("manifest_sha256", Text),
    _must("num_bytes", BigInteger),
    _must("published_at_ms", BigInteger),
)

activations = _policy_facts(
    "activations",
    _must("engine", Text),
    _may("adapter", Text),
    _must("pause_ms", Double),
    _must("num_bytes", BigInteger),
    _must("activated_at_ms", BigInteger),
)

rejections = _policy_facts(
    "rejections",
    _must("kind", Text),  # engine: it did not take the version over; step: its outcome was not published
    _may("engine", Text),
    _may("num_samples", BigInteger),
    _must("reason", Text),
    _may("step_ms", BigInteger),
    _must("rejected_at_ms", BigInteger),
)

replays = _facts(
    "replays",
    CONTROL,
    _must("replay", Text),
    _must("votes_from", Text),
    _may("judge", Text),
    _may("prompt_version", Text),
    _may("session_id", Text),
    _must("num_votes", BigInteger),
    _must("quorum", BigInteger),
    _must("ranges", JSONB),
    _must("started_at_ms", BigInteger),
    _may("off_distribution", Text),
    _may("reward_weights", JSONB),
    _may("hint_quorum", BigInteger),
    _may("teacher", Text),
    _may("heuristic_function", Text),
)

replay_ends = _facts(
    "replay_ends",
    CONTROL,
    _must("replay", Text),
    _must("num_exchanges", BigInteger),
    _must("num_turns", BigInteger),
    _must("num_verdicts", BigInteger),
    _must("num_hints", BigInteger),
    _must("num_samples", BigInteger),
    _must("num_refused", BigInteger),
    _must("num_calls", BigInteger),
    _must("num_unusable", BigInteger),
    _must("samples_sha256", Text),
    _must("ended_at_ms", BigInteger),
    _may("num_votes_cast", BigInteger),
)

promotions = _facts(
    "promotions",
    CONTROL,
    _must("policy_id", Text),
    _must("number", BigInteger),
    _may("replay", Text),
    _may("undoes", BigInteger),
    _must("promoted_at_ms", BigInteger),
)

rollbacks = _facts(
    "rollbacks",
    CONTROL,
    _must("policy_id", Text),
    _must("number", BigInteger),
    _must("to_version", BigInteger),
    _must("asked_at_ms", BigInteger),
)

pins = _facts(
    "pins",
    CONTROL,
    _must("policy_id", Text),
    _must("number", BigInteger),
    _must("policy_version", BigInteger),
    _must("pinned", Boolean),
    _must("asked_at_ms", BigInteger),
)

offsets = Table(
    "offsets",
    metadata,
    _must("topic", Text),
    _must("partition", Integer),
    _must("next_offset", BigInteger),
    _must("epoch", BigInteger),  # counts the projectors that owned the partition; the newest alone may write
    _may(
        "chain", LargeBinary
    ),  # see clawstream/projections/write/chain.py; NULL: nothing was read since there are chains
    _may("chain_from", BigInteger),  # the offset of its first record
    PrimaryKeyConstraint("topic", "partition"),
)

chain_blocks = Table(
    "chain_blocks",
    metadata,
    _must("topic", Text),
    _must("partition", Integer),
    _must("block", BigInteger),
    _must("next_offset", BigInteger),
    _must("chain", LargeBinary),
    _must("marks", LargeBinary),
    PrimaryKeyConstraint("topic", "partition", "block"),
)

set_aside = Table(
    "set_aside",  # records that were read and have no row; see clawstream/projections/write/sorting.py
    metadata,
    _must("topic", Text),
    _must("partition", Integer),
    _must("source_offset", BigInteger),
    _must("log_time_ms", BigInteger),
    _may("record_key", LargeBinary),
    _must("reason", Text),  # undecodable, unusable, failed, parked
    _must("error", Text),
    _must("attempt", BigInteger),
    _must("fate", Text),  # open: it waits; discarded
    PrimaryKeyConstraint("topic", "partition", "source_offset"),
)

overruled = Table(
    "overruled",  # what the books said where a person had the tables rebuilt with `--trust-log`
    metadata,
    _must("topic", Text),
    _must("partition", Integer),
    _must("overruled_at", DateTime(timezone=True)),
    _must("next_offset", BigInteger),
    _may("chain", LargeBinary),
    _must("made_next_offset", BigInteger),  # what the log gave in place of it
    _may("made_chain", LargeBinary),
    _must("kept_schema", Text),  # where the old tables were left
    PrimaryKeyConstraint("topic", "partition", "overruled_at"),
)

commits = Table(
    "commits",
    metadata,
    _must("topic", Text),
    _must("partition", Integer),
    _must("next_offset", BigInteger),
    _must("first_offset", BigInteger),
    _must("committed_at", DateTime(timezone=True)),
    PrimaryKeyConstraint("topic", "partition", "next_offset"),
)

FACTS = tuple(table for table in metadata.sorted_tables if "topic" in table.info)
TOPICS = tuple(dict.fromkeys(table.info["topic"] for table in FACTS))
RELATIONS = tuple(dict.fromkeys((*metadata.tables, *meanings.RELATIONS)))  # all that people may read
for table in metadata.tables.values():
    table.comment = meanings.RELATIONS.get(table.name)
    for column in table.columns:
        column.comment = meanings.meaning(table.name, column.name)
