"""`clawstream export`: writes conversations, and what was learned from them, to files, as they are at one moment.

A record is a line of <name>.jsonl or a row of <name>.parquet, with the columns of the queries below. JSONL has texts as
they were said. Parquet can hold only UTF-8, so it has them as stored, escaped as clawstream/projections/text.py says. A
file gets its name only when it is complete.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from itertools import islice
from pathlib import Path
from uuid import UUID

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from clawstream.projections.look.sql import QueryResult, ask, json_of, snapshot
from clawstream.projections.text import original_json

TIMEOUT_S = 3600.0
_ROWS_AT_ONCE = 200


class FileFormat(StrEnum):
    """The format of the files."""

    JSONL = "jsonl"
    PARQUET = "parquet"


# Only answers that no later request of the session repeats: so each conversation is there once, to its end.
_CONVERSATIONS = """
    SELECT e.session_id, e.exchange_id, s.client, e.model,
        request_messages(e.exchange_id) || jsonb_build_array(e.message) AS messages,
        request_options(e.exchange_id) -> 'tools' AS tools,
        e.finish_reason, e.policy_id, sampled_by(e.versions) AS policy_versions,
        t.reason AS orphaned_because,
        to_timestamp(e.received_at_ms / 1000.0) AS asked_at,
        to_timestamp(e.finished_at_ms / 1000.0) AS answered_at
    FROM exchanges AS e
    LEFT JOIN sessions AS s ON s.session_id = e.session_id
    LEFT JOIN turns AS t ON t.turn_id = e.exchange_id
    WHERE e.kind = 'completed' AND e.turn_type = 'main' AND t.kind IS DISTINCT FROM 'paired'
    ORDER BY e.session_id, e.source_partition, e.source_offset
"""
_JUDGEMENTS = """
    SELECT v.session_id, v.turn_id, v.judge, v.prompt_version, v.revision, v.status, v.score, v.hint,
        last_user_text(request_messages(v.turn_id)) AS request,
        message_text(e.message) AS answer,
        next_state_text(t.next_exchange_id, t.next_state) AS next_state,
        v.policy_versions, v.sample_id, v.reward, v.feedback_score, v.total_reward,
        (
            SELECT jsonb_agg(
                jsonb_build_object(
                    'question', o.question, 'ballot', o.ballot, 'status', o.status, 'score', o.score, 'hint', o.hint,
                    'text', o.text, 'error', o.error, 'latency_ms', o.latency_ms
                ) ORDER BY o.question, o.ballot, o.source_offset
            )
            FROM votes AS o
            WHERE o.turn_id = v.turn_id AND o.judge = v.judge AND o.revision = v.revision
                AND o.prompt_version = v.prompt_version
        ) AS votes,
        v.log_time AS judged_at
    FROM turn_scores AS v
    LEFT JOIN exchanges AS e ON e.exchange_id = v.turn_id AND e.message IS NOT NULL
    LEFT JOIN turns AS t ON t.turn_id = v.turn_id
    ORDER BY v.session_id, v.log_time, v.turn_id, v.revision, v.judge
"""
_SAMPLES = """
    SELECT sample_id, session_id, turn_id, judge, prompt_version, revision, reward, hint, prompt_ids, hinted_prompt_ids,
        response_ids, response_logprobs, trained, temperature, policy_id, sampled_by(versions) AS policy_versions,
        versions, num_earlier_turns, total_reward, person_reward, environment_reward, heuristic_reward, num_feedback,
        teacher, teacher_logprobs, student_logprobs, student_version, group_id, step_index, refreshed_id,
        hint_by_person, cut, calls_tools, num_thinking, log_time AS assembled_at
    FROM samples
    ORDER BY session_id, source_partition, source_offset
"""
# Judgements are a judge's; what people, environments and heuristics said is here.
_FEEDBACK = """
    SELECT f.session_id, f.turn_id, f.feedback_id, f.source, f.key_name, f.score, f.text,
        last_user_text(request_messages(f.turn_id)) AS request,
        message_text(e.message) AS answer,
        next_state_text(t.next_exchange_id, t.next_state) AS next_state,
        sampled_by(e.versions) AS policy_versions,
        to_timestamp(f.given_at_ms / 1000.0) AS given_at
    FROM feedback AS f
    LEFT JOIN exchanges AS e ON e.exchange_id = f.turn_id AND e.kind = 'completed'
    LEFT JOIN turns AS t ON t.turn_id = f.turn_id
    ORDER BY f.session_id, f.source_partition, f.source_offset
"""
_STEPS = """
    SELECT s.policy_id, s.policy_version, b.parent_version, b.sample_ids, b.replay, b.rollback, b.seed, b.settings,
        s.num_samples, s.num_hinted, s.num_rewarded, s.num_tokens, s.num_tokens_dropped, s.loss_nats,
        s.kl_reference_nats, s.mean_gap_nats, s.mean_reward, s.clipped_share, s.grad_norm, s.learning_rate,
        s.mean_versions_behind, s.max_versions_behind, s.step_ms, s.entropy_nats, s.behaviour_kl_nats,
        s.mean_response_tokens, s.weights_changed_share, r.reason AS rejected_because,
        to_timestamp(s.taken_at_ms / 1000.0) AS taken_at
    FROM steps AS s
    LEFT JOIN batches AS b USING (policy_id, policy_version)
    LEFT JOIN rejections AS r
        ON r.kind = 'step' AND r.policy_id = s.policy_id AND r.policy_version = s.policy_version
    ORDER BY s.policy_id, s.policy_version, s.source_offset
"""
_VERSIONS = """
    SELECT v.policy_id, v.policy_version, v.parent_version, p.path, p.adapter, p.manifest_sha256, p.num_bytes,
        (
            SELECT jsonb_agg(
                jsonb_build_object('engine', a.engine, 'pause_ms', a.pause_ms, 'activated_at_ms', a.activated_at_ms)
                ORDER BY a.source_offset
            )
            FROM activations AS a
            WHERE a.policy_id = v.policy_id AND a.policy_version = v.policy_version
        ) AS activations,
        v.num_served, v.num_scored, v.mean_score::float8 AS mean_score, v.published_at
    FROM policy_report AS v
    LEFT JOIN policies AS p USING (policy_id, policy_version)
    ORDER BY v.policy_id, v.policy_version
"""
QUERIES: Mapping[str, str] = {
    "conversations": _CONVERSATIONS,
    "judgements": _JUDGEMENTS,
    "feedback": _FEEDBACK,
    "samples": _SAMPLES,
    "steps": _STEPS,
    "versions": _VERSIONS,
}
_ARROW: Mapping[str, pa.DataType] = {
    "bool": pa.bool_(),
    "text": pa.string(),
    "uuid": pa.string(),
    "jsonb": pa.string(),
    "int8": pa.int64(),
    "float8": pa.float64(),
    "timestamptz": pa.timestamp("us", tz="UTC"),
}
_ARROW_ITEMS: Mapping[str, pa.DataType] = {
    "text": pa.string(),
    "int2": pa.int8(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
}
_ESCAPE_NOTE = {b"clawstream.text": b"U+241B 'u' and four hex digits stand for that code point"}


def export(url: str, folder: Path, *, form: FileFormat) -> dict[str, int]:
    """Write the files into `folder` and return how many records each has; raises what `snapshot` raises."""
    folder.mkdir(parents=True, exist_ok=True)
    write = _write_jsonl if form is FileFormat.JSONL else _write_parquet
    counts = {}
    with snapshot(url, timeout_s=TIMEOUT_S) as cursor:
        for name, query in QUERIES.items():
            with _whole(folder / f"{name}.{form}") as path, ask(cursor, query) as answer:
                counts[name] = write(answer, path)
    return counts


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file there is renamed to `path` if the block ends without an error."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_jsonl(answer: QueryResult, path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in answer.rows:
            record = dict(zip(answer.names, row, strict=True))
            file.write(original_json(json_of(record) + "\n"))
            count += 1
    return count


def _write_parquet(answer: QueryResult, path: Path) -> int:
    count = 0
    schema = _schema(answer)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := list(islice(answer.rows, _ROWS_AT_ONCE)):
            columns = zip(*batch, strict=True)
            arrays = [pa.array(map(_plain, values), field.type) for values, field in zip(columns, schema, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
            count += len(batch)
    return count


def _schema(answer: QueryResult) -> pa.Schema:
    fields = []
    for name, oid in zip(answer.names, answer.type_oids, strict=True):
        info = psycopg.adapters.types.get(oid)
        assert info is not None, f"column {name} has a type that no query here gives"
        fields.append(pa.field(name, pa.list_(_ARROW_ITEMS[info.name]) if info.array_oid == oid else _ARROW[info.name]))
    return pa.schema(fields, metadata=_ESCAPE_NOTE)


def _plain(value: object) -> object:
    return str(value) if isinstance(value, str | UUID) else value
